"""`Interpreter`: one Python in a living sandbox, whose variables stay from run to run."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from stockade.errors import PolicyError
from stockade.gate.client import MOST_BYTES
from stockade.gate.template import Resumed
from stockade.live.shell import Session
from stockade.live.talk import Told
from stockade.sandbox.launch import Box, Prepared
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.sandbox import command
from stockade.sandbox.steps import Events, Steps, drive
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE, Run

if TYPE_CHECKING:
    from stockade.receipt.account import Account
    from stockade.receipt.statement import Who
    from stockade.sandbox.aio import AsyncSandbox
    from stockade.sandbox.sandbox import Sandbox

#: How much larger an answer may be than what it carries, which `limits.output` bounds; a driver that says
#: more is ended.
WORDS = 1 << 20
#: How many lists, tuples and dictionaries an answer may have, and how many keys that can be made alike.
MOST_PARTS, FEW = 100_000, 1000
#: The system's; in a sandbox of a `WarmPython` a copy of its template.
DEFAULT = "python3"
#: Reads the driver's text from its descriptor 3 and becomes it.
BOOT = """\
import os
def take(control, size):
    data = b""
    while len(data) < size:
        more = os.read(control, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data
exec(compile(take(3, int(take(3, 9))), "<stockade>", "exec"), {"take": take, "__file__": "<stockade>"})
"""


class Opaque(msgspec.Struct, frozen=True):
    """A value that is no plain data: what it is, and its repr."""

    type: str
    text: str

    def __repr__(self) -> str:
        return self.text


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback."""

    file: str
    line: int
    name: str
    text: str


class Failure(msgspec.Struct, frozen=True):
    """An exception that ended a run."""

    type: str
    message: str
    frames: tuple[Frame, ...] = ()


class Answer(Result, frozen=True, kw_only=True):
    """The result of code: as of a command, and what the interpreter says.

    All of it is the word of untrusted code about itself.
    """

    #: Of the last line, if that is an expression: plain data (numbers, text, bytes, lists, tuples, dicts), or
    #: `Opaque` where it is anything else.
    value: Any = None
    #: What was shown, by mime type: text is str, pictures are bytes.
    displays: tuple[dict[str, str | bytes], ...] = ()
    #: The exception that ended the code.
    error: Failure | None = None
    #: How many displays and values were too large.
    left_out: int = 0


@cache
def _driver() -> bytes:
    from importlib.resources import files

    text = files("stockade.live").joinpath("driver.py").read_bytes()
    return b"%09d" % len(text) + text


def _decoded(said: object, depth: int = 0) -> Any:
    """What the driver encoded. Anything else is a ValueError."""
    if said is None or isinstance(said, bool | int | float | str):
        return said
    if depth > 100:
        raise ValueError("too deep")
    if isinstance(said, list):
        return [_decoded(part, depth + 1) for part in said]
    if not isinstance(said, dict) or len(said) != 1:
        raise ValueError("no value")
    ((letter, content),) = said.items()
    if letter == "b":
        return base64.b64decode(content, validate=True)
    if letter == "o":
        return Opaque(*map(str, content[:2]))
    parts = _decoded(content, depth + 1) if isinstance(content, list) else []
    if letter == "t":
        return tuple(parts)
    if letter != "d" or (len(parts) > 2 * FEW and any(map(_is_costly, parts[::2]))):
        raise ValueError("no value")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _is_costly(key: object) -> bool:
    """Whether somebody can choose many such keys that all have one hash: then a dictionary takes for ever."""
    return not isinstance(key, str | bytes) and not (isinstance(key, int) and abs(key) < 1 << 53)


def _displays(said: object) -> Iterable[dict[str, str | bytes]]:
    for forms in said if isinstance(said, list) else ():
        found = {mime: _decoded(form) for mime, form in forms.items()}
        yield {mime: form for mime, form in found.items() if isinstance(form, str | bytes)}


def _failure(said: Any) -> Failure | None:
    if said is None:
        return None
    frames = tuple(Frame(str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in said["frames"])
    return Failure(str(said["type"]), str(said["message"]), frames)


def _answer(result: Result, told: Told | None) -> Answer:
    """The result with what the interpreter said, as far as that can be read."""
    fields: dict[str, Any] = {name: getattr(result, name) for name in result.__struct_fields__}
    if told is None:
        return Answer(**fields)
    try:
        said = _parsed(told)
        if said.get("preload"):
            return Answer(**fields)
        return Answer(
            **fields,
            value=_decoded(said.get("value")),
            displays=tuple(_displays(said.get("displays"))),
            error=_failure(said.get("error")),
            left_out=int(said.get("left_out", 0)),
        )
    except UNREADABLE:
        return Answer(**fields, left_out=1)


#: What an answer that is none raises when it is read.
UNREADABLE = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _parsed(told: Told) -> Any:
    if told.content.count(b"[") + told.content.count(b"{") > MOST_PARTS:
        raise ValueError("it would take many times its size in memory")
    return json.loads(told.content)


class Python(Session):
    """What `Interpreter` and `AsyncInterpreter` share: everything but the waiting."""

    name = program = "interpreter"
    state = "its variables"
    _preload: tuple[str, ...] = ()
    _executable = DEFAULT
    _ipython: bool | None = None

    def _set(self, preload: Iterable[str], executable: str, ipython: bool | None) -> None:
        if isinstance(preload, str):
            raise PolicyError(f"preload = {preload!r}: is one string", hint='write a list: ("numpy",)')
        self._preload, self._executable, self._ipython = tuple(preload), executable, ipython

    def _asking(
        self, box: Box, prepared: Prepared, code: str, events: Events, account: Account, *, given: bytes,
        timeout: float | None, grace: float, on_stdout: Sink | None, on_stderr: Sink | None,
    ) -> Steps[Answer]:  # fmt: skip
        words = [self._executable, "-u", "-c", BOOT]
        if prepared.template is not None and self._executable == DEFAULT:
            words = Resumed([prepared.template.argv[0], "-c", BOOT], prepared.template)
        driver = command(prepared, words, env=None, cwd=None, timeout=None, kept=True)
        run: Run = command(
            prepared, words, given=given, env=None, cwd=None, timeout=timeout, grace=grace,
            on_stdout=on_stdout, on_stderr=on_stderr, kept=True,
        )  # fmt: skip
        number = os.urandom(12).hex()
        request = self._request(code, number, run.limit)
        told, result = yield from self._running(
            box, prepared, driver, run, request, number.encode(), run.limit * 3 + WORDS, events, account
        )
        answer = _answer(result, told)
        if answer.outcome is Outcome.SETUP_FAILED:
            self._let_go()
        return answer

    def _said(self, result: Result, told: Told | None) -> Result:
        """A module that is to be loaded first and cannot be: nothing was run."""
        try:
            preload = _parsed(told).get("preload") if told is not None else None
        except UNREADABLE:
            return result
        if not preload:
            return result
        return msgspec.structs.replace(
            result,
            outcome=Outcome.SETUP_FAILED,
            exit_code=125,
            reason=f"preload: {preload}",
            hint="is it installed inside, and shown by the policy?",
        )

    def _first(self) -> bytes:
        return _driver()

    def _request(self, code: str, number: str, most: int) -> bytes:
        said = {
            "code": code, "number": number, "most": most, "preload": self._preload, "ipython": self._ipython
        }  # fmt: skip
        request = json.dumps(said).encode()
        if len(request) > MOST_BYTES:
            raise PolicyError(
                f"the code takes {len(request)} bytes, more than {MOST_BYTES}",
                hint="hand large data in through `input` or a file",
            )
        return b"%09d" % len(request) + request


class Interpreter(Python):
    """One Python in a `Sandbox`.

    >>> import stockade
    >>> with stockade.Sandbox() as box, box.python() as python:
    ...     _ = python.run("x = [1, 2]")
    ...     python.run("x.append(3); print('hi'); x").value
    [1, 2, 3]

    Variables stay from run to run, also after an exception, `sys.exit()` and a timeout. `display(...)`,
    rich values and figures of matplotlib come back as `displays`. When the interpreter itself is gone, the
    result says so, and the next run starts a fresh one. Several threads may use it; one run waits for the
    other. Where IPython is installed inside, its shell runs the code.
    """

    def __init__(
        self, sandbox: Sandbox, preload: Iterable[str], executable: str, ipython: bool | None
    ) -> None:
        super().__init__(sandbox)
        self._set(preload, executable, ipython)
        self._sandbox = sandbox
        self._lock = threading.Lock()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._let_go()

    def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Answer:
        """Run code in the interpreter. When the time is over, it meets a KeyboardInterrupt."""
        account = self._account(code, who)
        with account.telling(), self._lock:
            self._sandbox._before_run()
            with self._sandbox._used() as (box, prepared), Events() as events:
                steps = self._asking(
                    box, prepared, code, events, account, given=input, timeout=timeout, grace=grace,
                    on_stdout=on_stdout, on_stderr=on_stderr,
                )  # fmt: skip
                return drive(steps, events)

    def close(self) -> None:
        """End the interpreter and what it has started."""
        self._hang_up()
        with self._lock:
            self._let_go()


class AsyncInterpreter(Python):
    """One Python in an `AsyncSandbox`; as `Interpreter`, with `await`. A cancelled run is interrupted."""

    def __init__(
        self, sandbox: AsyncSandbox, preload: Iterable[str], executable: str, ipython: bool | None
    ) -> None:
        import asyncio

        super().__init__(sandbox)
        self._set(preload, executable, ipython)
        self._sandbox = sandbox
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncInterpreter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._let_go()

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Answer:
        """Run code in the interpreter, as `Interpreter.run` does."""
        from stockade.sandbox import aio

        account = self._account(code, who)
        with account.telling():
            async with self._lock, self._sandbox._used() as (box, prepared):
                await self._sandbox._snapshotted()
                with Events() as events:
                    steps = self._asking(
                        box, prepared, code, events, account, given=input, timeout=timeout, grace=grace,
                        on_stdout=on_stdout, on_stderr=on_stderr,
                    )  # fmt: skip
                    return await aio.drive(steps, events)

    async def close(self) -> None:
        """End the interpreter and what it has started."""
        self._hang_up()
        async with self._lock:
            self._let_go()
