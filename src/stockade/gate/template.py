"""A template: an interpreter for a resident gate to live in.

Programs can then go on in copies of it instead of being executed: see
`gate/src/template.c` for how, `inside.template_interpreter` for what it executes,
`functions.interpreter_template` and `runs.network.egress_template` for what they load.
"""

from __future__ import annotations

import _socket
import os
import select
import threading
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from stockade import gate
from stockade.errors import PolicyError, SetupError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.resolve.resolved import ResolvedPolicy


#: Reads a line of configuration and the code to execute from descriptor 5. The template has none of the
#: caller's paths, variables and start-up files, and writes nothing to the installs that it loads from.
BOOT = """\
import os
line, _, text = os.pread(5, os.fstat(5).st_size, 0).partition(b"\\n")
exec(compile(text, "<stockade>", "exec"), {"__name__": "<stockade>", "CONFIG": eval(line)})
"""
WORDS = ("-I", "-S", "-B", "-c", BOOT)
#: Keeps libraries from starting threads.
ENVIRON = {
    "LANG": "C.UTF-8",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
#: How many seconds the modules may take to load.
SECONDS = 120.0


class Template(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How a template is started, and for which policy it was made."""

    #: The interpreter executes the text that it finds at its descriptor OPEN_TEXT.
    argv: tuple[str, ...]
    environ: dict[str, str]
    #: Returns that text for a kind of resident gate, and for what tests want it to leave out.
    text: Callable[[str, str], bytes]
    #: What it was made for, and what it therefore never loads from, by device and inode. Without a policy its
    #: copies run only our own code.
    policy: Policy | None = None
    roots: set[tuple[int, int]] = msgspec.field(default_factory=set)
    #: How long it may take to get ready.
    seconds: float = SECONDS
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


def template_text(
    kind: str,
    order: str,
    preload: Sequence[str],
    roots: set[tuple[int, int]],
    paths: Sequence[str] = (),
    absent: Sequence[str] = (),
) -> bytes:
    """Return what the interpreter executes.

    `paths` are directories of Stockade's own modules, if it loads only those; `absent` are modules that it
    must do without.
    """
    config = {
        "kind": kind,
        "order": order,
        "library": gate.library(),
        "preload": tuple(preload),
        "roots": roots,
        "paths": tuple(paths),
        "own": bool(paths),
        "absent": tuple(absent),
    }
    return f"{config!r}\n".encode("utf-8", "surrogateescape") + _driver()


@cache
def _driver() -> bytes:
    # Not importlib.resources, which takes as long to load as half of a start.
    package = os.path.dirname(os.path.dirname(os.path.abspath(gate.__file__)))
    with open(os.path.join(package, "inside", "template_interpreter.py"), "rb", buffering=0) as file:
        return file.read()


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
