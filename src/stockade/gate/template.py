"""A template: an interpreter for a resident gate to live in.

Programs can then go on in copies of it instead of being executed: see
`gate/src/template.c` for how, and `functions.interpreter_template` for what it loads.
"""

from __future__ import annotations

import _socket
import os
import select
import threading
from collections.abc import Callable, Sequence

import msgspec

from stockade.errors import PolicyError, SetupError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.resolve.resolved import ResolvedPolicy


class Template(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How a template is started, and for which policy it was made."""

    #: The interpreter executes the text that it finds at its descriptor OPEN_TEXT.
    argv: tuple[str, ...]
    environ: dict[str, str]
    #: Returns that text for a kind of resident gate, and for what tests want it to leave out.
    text: Callable[[str, str], bytes]
    #: What it was made for, and what it therefore never loads from, by device and inode.
    policy: Policy
    roots: set[tuple[int, int]]
    #: How long it may take to get ready.
    seconds: float
    #: Once set, it is not started again.
    retired: threading.Event = msgspec.field(default_factory=threading.Event)

    def check(self, resolved: ResolvedPolicy) -> None:
        """Refuse a policy that hides, or lets programs change, what the template may have loaded."""
        check_policy(resolved.policy)
        if resolved.policy == self.policy:
            return
        for tree in not_loaded_from(resolved):
            if not self._keeps_off(tree):
                raise PolicyError(
                    f"the WarmPython was not made for this policy: it may have loaded modules from {tree}",
                    hint="open another one with the policy that you want",
                )

    def _keeps_off(self, tree: str) -> bool:
        while True:
            info = os.stat(tree)
            if (info.st_dev, info.st_ino) in self.roots:
                return True
            if tree == "/":
                return False
            tree = os.path.dirname(tree)

    def await_ready(self, control: _socket.socket) -> None:
        """Wait until the template has loaded its modules; raise SetupError with its reason if it cannot."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        ready = poll.poll(self.seconds * 1000)
        said = control.recv(4096).decode("utf-8", "replace") if ready else ""
        if said == "ready":
            return
        late = f"it was not ready after {self.seconds:g} s"
        raise SetupError(
            f"the template did not start: {said or ('it ended' if ready else late)}",
            stage="template",
            hint=f"see what `{self.argv[0]} -I` says to the same imports",
        )


def check_policy(policy: Policy) -> None:
    """Refuse a policy that no copy of a template can keep."""
    if policy.exec is not None:
        raise PolicyError(
            "exec: a copy of a template is not executed, so that no list of programs could refuse it",
            hint="leave `exec` out, or run python3 as a command",
        )


def not_loaded_from(resolved: ResolvedPolicy) -> list[str]:
    """Return the trees that no template may load from: what programs may change or may not see."""
    found = [grant.path for grant in resolved.grants if grant.access != "read"]
    found += [] if resolved.workspace is None else [resolved.workspace.path]
    return [tree for tree in (*found, *resolved.denied) if os.path.exists(tree)]


class TemplateArgv(list[str]):
    """The argv of a program that goes on in a copy of the template."""

    def __init__(self, words: Sequence[str], template: Template) -> None:
        super().__init__(words)
        self.template = template
