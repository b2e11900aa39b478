"""An interpreter for a resident gate to live in.

Programs can then go on in copies of it instead of being executed: see
`gate/src/template.c` for how, and `worker.template` for what it loads.
"""

from __future__ import annotations

import _socket
import select
import threading
from collections.abc import Callable, Sequence

import msgspec

from stockade.errors import SetupError


class Template(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is started, and what it is told."""

    #: It finds the text that it is to execute behind its descriptor 5.
    argv: tuple[str, ...]
    environ: dict[str, str]
    #: Makes that text, of the kind of resident gate and of what tests want to be left out.
    text: Callable[[str, str], bytes]
    #: How long it may take to get ready.
    seconds: float
    #: Once set, it is not started again.
    retired: threading.Event = msgspec.field(default_factory=threading.Event)

    def await_ready(self, control: _socket.socket) -> None:
        """Wait until it has loaded what it is to have, or says why not."""
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


class Resumed(list[str]):
    """The words of a program that goes on in a copy of the template."""

    def __init__(self, words: Sequence[str], template: Template) -> None:
        super().__init__(words)
        self.template = template
