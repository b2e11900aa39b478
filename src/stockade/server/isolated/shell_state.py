"""The state of a session's shell as code: directory, variables, functions, aliases and options.

A background run is a second bash beside the shell of its session, and must
find what the shell has; a session whose layers are emptied gets a new sandbox,
and its new shell must go on where the old one was. Both run this code first.
The shell writes it itself, so it is as untrusted as everything that the
session runs, and it only ever runs in that session again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stockade.errors import SetupError
from stockade.sessions.bash import quoted

if TYPE_CHECKING:
    from stockade.sandbox import AsyncShell

#: Makes the shell print its state. Traps stay: those of the shell's driver must not be copied.
SAVE = (
    "builtin declare -p; builtin declare -f; builtin declare -Fx; builtin alias -p; builtin shopt -p; "
    "builtin set +o; builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin umask -p"
)
#: The shell's own variables of the driver: a new shell has its own.
OWN = re.compile(rb"declare -\S+ _stockade\w*(=.*)?$")
#: How much a state may be; a request to the shell holds four times as much, for the quotation.
LARGEST = 1 << 20
#: Reads the state and the code from stdin, and runs the code with an empty one.
BACKGROUND = 'builtin . /dev/stdin 2>/dev/null; builtin exec </dev/null; builtin eval "$_stockade_code"'


class StateBuffer:
    """Keeps what the shell prints, up to a limit."""

    def __init__(self) -> None:
        self.data = bytearray()

    def __call__(self, piece: bytes) -> None:
        if len(self.data) <= LARGEST:
            self.data += piece


async def save_state(shell: AsyncShell) -> bytes:
    """Return code that gives another bash the state of this one; the shell must be between two runs."""
    buffer = StateBuffer()
    await shell.run(SAVE, on_stdout=buffer, timeout=10)
    if len(buffer.data) > LARGEST:
        raise SetupError(
            f"the variables and functions of the session's shell take more than {LARGEST >> 20} MiB",
            stage="session",
            hint="unset the large ones: a background run and a reset begin with a copy of them",
        )
    return without_own(bytes(buffer.data))


def without_own(state: bytes) -> bytes:
    """Return a state without the variables of the shell's driver."""
    return b"\n".join(line for line in state.split(b"\n") if not OWN.match(line))


def background_argv() -> list[str]:
    """Return the argv of a background run; its stdin is `background_input`."""
    return ["bash", "-c", BACKGROUND, "bash"]


def background_input(state: bytes, envs: Mapping[str, str], code: str) -> bytes:
    """Return the stdin of a background run: the shell's state, the run's own variables, and its code."""
    exports = [f"builtin export {name}={quoted(value)}" for name, value in envs.items()]
    return b"\n".join((state, *(line.encode() for line in exports), _code(code)))


def _code(code: str) -> bytes:
    return f"_stockade_code={quoted(code)}\n".encode()
