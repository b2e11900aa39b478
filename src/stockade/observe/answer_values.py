"""An answer to "may it, and why?", as a value, and the change of the policy that would allow it."""

from __future__ import annotations

import msgspec

from stockade.observe.access import Access


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest change of a policy that would allow an access."""

    #: The line to add to a policy file, such as `read = ["/opt/data"]`; "" if a line must go instead.
    toml: str = ""
    #: The same for the command line; "" if it has no option for that.
    flag: str = ""
    #: The clause that must go; "" if a line must be added.
    remove: str = ""
    #: Why the change is dangerous; "" if it is not.
    danger: str = ""

    def describe(self) -> str:
        """Return what to do, in words."""
        if self.remove:
            words = f"take out {self.remove}"
            return f"{words} ({self.flag})" if self.flag else words
        return f"{self.flag} ({self.toml})" if self.flag else self.toml


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a program may do something, which wall decides, and what would allow it.

    For an access that failed (`access.error`), `allowed` says that no wall refused it: the error is an
    ordinary one, such as a file that the host does not have either.
    """

    access: Access
    allowed: bool
    #: The control that decides.
    wall: str
    #: The clause that decides, or that does not allow it; `default` for what no clause changes.
    clause: str
    #: The file and the line of the clause; "" if no file writes it.
    place: str = ""
    #: Why, in one sentence.
    reason: str
    #: None if no change of the policy would allow it, or none is needed.
    change: PolicyChange | None = None
