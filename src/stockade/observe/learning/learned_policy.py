"""A learned policy: what the runs began with, what learning adds, and what is left to ask."""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.observe.learning.lesson import LearnedEntry, LearnQuestion
from stockade.policy.merging import merge
from stockade.policy.model import Policy

#: The clauses that are lists, in the order in which a policy file has them.
LISTS = ("read", "net", "pass_env", "toolchain", "exec")


class LearnedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest policy that learning found, with a reason for each entry."""

    #: What the runs began with.
    start: Policy
    read: tuple[LearnedEntry, ...] = ()
    net: tuple[LearnedEntry, ...] = ()
    pass_env: tuple[LearnedEntry, ...] = ()
    #: Further commands whose installs are shown.
    toolchain: tuple[LearnedEntry, ...] = ()
    #: The only programs that may be executed; none if every program may be.
    exec: tuple[LearnedEntry, ...] = ()
    limits: dict[str, LearnedEntry] = {}
    questions: tuple[LearnQuestion, ...] = ()
    #: What the reader of the file should know besides, one sentence each.
    notes: tuple[str, ...] = ()
    #: How often the command ran, and how it ended the last time.
    runs: int = 0
    ended: str = ""
    exit_code: int = 0
    #: Whether the last run, under this very policy, met no refusal but those of the questions.
    settled: bool = False

    @property
    def additions(self) -> dict[str, tuple[LearnedEntry, ...]]:
        """By clause, the entries that the start does not have."""
        had = self.start.table(full=True)
        return {
            name: new
            for name in LISTS
            if (
                new := tuple(
                    one for one in getattr(self, name) if one.text not in (_listed(had.get(name)) or ())
                )
            )
        }

    def policy(self, *, narrowed: bool = True) -> Policy:
        """Return the policy; without `narrowed`, without the limits and programs that were learned."""
        flags: dict[str, Any] = {
            name: [one.text for one in entries]
            for name, entries in self.additions.items()
            if narrowed or name != "exec" or self.start.exec is not None
        }
        if flags.get("net") and self.start.net == "open":
            del flags["net"]
        if narrowed and self.limits:
            known = self.start.limits
            flags["limits"] = {
                name: one.text.strip('"') for name, one in self.limits.items() if getattr(known, name) is None
            }
        return merge(self.start, flags)


def _listed(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []
