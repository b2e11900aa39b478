"""`Interpreter`: one Python in a living sandbox; its variables stay from run to run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, Unpack

import msgspec

from stockade.errors import PolicyError
from stockade.gate.template import TemplateArgv
from stockade.gate.wire import EXEC_MAX_SIZE
from stockade.receipt.account import Account
from stockade.result import Outcome, Result
from stockade.runs.command import command
from stockade.runs.decoder import Decoder
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.options import CodeOptions, refuse_unknown
from stockade.runs.prepare import RunPreparation
from stockade.sessions.exchange import DriverReply
from stockade.sessions.session import AsyncLivingSandbox, LivingSandbox, Session

T = TypeVar("T")

#: How many bytes an answer may have beyond its content, which `limits.output` bounds. The supervisor ends a
#: driver that sends more.
WORDS = 1 << 20
#: How much memory the value and the displays may take, by `limits.output`; how many frames a traceback has.
ROOM, MOST_FRAMES = 4, 100
#: The longest answer of a driver that could not load a module.
MOST_REASON = 1 << 16
#: The system's Python; in a sandbox of a `WarmPython`, a copy of its template.
DEFAULT = "python3"
#: Reads the sources of the encoder and of the driver from descriptor 3 and executes them.
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
def load(**names):
    exec(compile(take(3, int(take(3, 9))), "<stockade>", "exec"), names)
    return names
import types
encoder = types.SimpleNamespace(**load(__name__="encoder"))
load(take=take, encoder=encoder, __file__="<stockade>")
"""


class OpaqueValue(msgspec.Struct, frozen=True):
    """A value that is not plain data: its type and its repr."""

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


class CodeResult(Result, frozen=True, kw_only=True):
    """The result of code: that of a command, and what the interpreter reports.

    The interpreter's report is untrusted: the code could have forged all of it.
    """

    #: The value of the last line, if that is an expression: plain data, as a sandboxed function may return,
    #: or an `OpaqueValue` for anything else.
    value: Any = None
    #: What the code displayed, by mime type: text is str, pictures are bytes.
    displays: tuple[dict[str, str | bytes], ...] = ()
    #: The exception that ended the code.
    error: Failure | None = None
    #: How many displays and values were left out because they were too large.
    left_out: int = 0


@cache
def _driver() -> bytes:
    from importlib.resources import files

    inside = files("stockade.inside")
    texts = [inside.joinpath(name).read_bytes() for name in ("encoder.py", "python_session.py")]
    return b"".join(b"%09d" % len(text) + text for text in texts)


class _Report:
    """The interpreter's report, which the code may have forged; reading it raises one of `UNREADABLE`."""

    def __init__(self, reply: DriverReply, most: int) -> None:
        self._room = most * ROOM
        self._last: Decoder | None = None
        self._parts: dict[str, Any] = Decoder(reply.content, most + 2 * WORDS).whole()
        self.left_out = _typed(self._parts.get("left_out", 0), int)

    def value(self) -> Any:
        content = self._parts.get("value")
        try:
            return None if content is None else self._decoded(content)
        except OverflowError:
            self.left_out += 1
            return OpaqueValue("", "<too large to keep>")

    def displays(self) -> Iterable[dict[str, str | bytes]]:
        for content in _typed(self._parts.get("displays", []), list):
            forms = _typed(self._decoded(content), dict).items()
            yield {_typed(mime, str): form for mime, form in forms if isinstance(form, str | bytes)}

    def failure(self) -> Failure | None:
        error = self._parts.get("error")
        if error is None:
            return None
        frames = tuple(
            Frame(_typed(file, str), _typed(line, int), _typed(name, str), _typed(text, str))
            for file, line, name, text in error["frames"][-MOST_FRAMES:]
        )
        return Failure(_typed(error["type"], str), _typed(error["message"], str), frames)

    def _decoded(self, content: bytes) -> Any:
        decoder = Decoder(_typed(content, bytes), self._room, opaque=OpaqueValue)
        decoder.go_on_from(self._last)
        value = decoder.whole()
        self._last = decoder
        return value


def _typed(part: Any, kind: type[T]) -> T:
    if not isinstance(part, kind):
        raise TypeError(f"a report has a {type(part).__name__} in place of a {kind.__name__}")
    return part


def _with_report(result: Result, reply: DriverReply | None, most: int) -> CodeResult:
    """Add the interpreter's report to the result, as far as it can be read."""
    fields: dict[str, Any] = {name: getattr(result, name) for name in result.__struct_fields__}
    if reply is None or _preload_failure(reply):
        return CodeResult(**fields)
    try:
        report = _Report(reply, most)
        displays, value = tuple(report.displays()), report.value()
        return CodeResult(
            **fields, value=value, displays=displays, error=report.failure(), left_out=report.left_out
        )
    except UNREADABLE:
        return CodeResult(**fields, left_out=1)


#: What reading a malformed report raises.
UNREADABLE = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError)


def _preload_failure(reply: DriverReply) -> str:
    """Return why a driver could not load a module; it reports nothing else then."""
    if not reply.content.startswith(b"d\x01u\x07preload") or len(reply.content) > MOST_REASON:
        return ""
    try:
        return _typed(Decoder(reply.content, 4 * MOST_REASON).whole()["preload"], str)
    except UNREADABLE:
        return ""


class Python(Session):
    """What `Interpreter` and `AsyncInterpreter` share: everything but the waiting."""

    name = program = "interpreter"
    state = "its variables"
    _preload: tuple[str, ...] = ()
    _executable = DEFAULT
    _ipython: bool | None = None

    def _set(self, preload: Iterable[str], executable: str, ipython: bool | None) -> None:
        if isinstance(preload, str):
            raise PolicyError(f"preload = {preload!r}: is one string", hint='write a list: ["numpy"]')
        self._preload, self._executable, self._ipython = tuple(preload), executable, ipython

    def _run_code(
        self,
        box: LaunchedSandbox,
        prepared: RunPreparation,
        code: str,
        events: Events,
        account: Account,
        options: CodeOptions,
    ) -> Steps[CodeResult]:
        words = [self._executable, "-u", "-c", BOOT]
        if prepared.template is not None and self._executable == DEFAULT:
            words = TemplateArgv([prepared.template.argv[0], "-c", BOOT], prepared.template)
        driver = command(prepared, words, kept=True)
        run = command(prepared, words, options, kept=True)
        number = os.urandom(12).hex()
        request = self._request(code, number, run.limit)
        reply, result = yield from self._run_on_driver(
            box, prepared, driver, run, request, number.encode(), run.limit + WORDS, events, account
        )
        answer = _with_report(result, reply, run.limit)
        if answer.outcome is Outcome.SETUP_FAILED:
            self._let_go()
        return answer

    def _revise(self, result: Result, reply: DriverReply | None) -> Result:
        """Turn the report of a failed preload into a setup failure: the code has not run."""
        preload = "" if reply is None else _preload_failure(reply)
        if not preload:
            return result
        return msgspec.structs.replace(
            result,
            outcome=Outcome.SETUP_FAILED,
            exit_code=125,
            reason=f"preload: {preload}",
            hint="check that the module is installed for the Python inside and that the policy shows it",
        )

    def _preamble(self) -> bytes:
        return _driver()

    def _request(self, code: str, number: str, most: int) -> bytes:
        message = {
            "code": code, "number": number, "most": most, "preload": self._preload, "ipython": self._ipython
        }  # fmt: skip
        request = json.dumps(message).encode()
        if len(request) > EXEC_MAX_SIZE:
            raise PolicyError(
                f"the code takes {len(request)} bytes, more than {EXEC_MAX_SIZE}",
                hint="pass large data through `input` or a file",
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
    rich values and figures of matplotlib come back as `displays`. If the interpreter itself ends, the
    result says so, and the next run starts a fresh one. Several threads may use it; their runs take turns.
    If IPython is installed inside, its shell runs the code.
    """

    def __init__(
        self, sandbox: LivingSandbox, preload: Iterable[str], executable: str, ipython: bool | None
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

    def run(self, code: str, **options: Unpack[CodeOptions]) -> CodeResult:
        """Run code in the interpreter. After the timeout it gets a KeyboardInterrupt.

        The options are `input`, `timeout`, `grace`, `on_stdout`, `on_stderr` and `who`, as for
        `stockade.run`.
        """
        refuse_unknown("run", options, CodeOptions.__optional_keys__)
        account = self._account(code, options.get("who"))
        with account.telling(), self._lock:
            self._sandbox.before_run()
            with self._sandbox.use() as (box, prepared), Events() as events:
                return drive(self._run_code(box, prepared, code, events, account, options), events)

    def close(self) -> None:
        """End the interpreter and what it has started."""
        self._hang_up()
        with self._lock:
            self._let_go()


class AsyncInterpreter(Python):
    """One Python in an `AsyncSandbox`: `Interpreter` with `await`. Cancelling a run interrupts the code."""

    def __init__(
        self, sandbox: AsyncLivingSandbox, preload: Iterable[str], executable: str, ipython: bool | None
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

    async def run(self, code: str, **options: Unpack[CodeOptions]) -> CodeResult:
        """Run code in the interpreter, as `Interpreter.run` does."""
        from stockade.runs.io import async_eventloop

        refuse_unknown("run", options, CodeOptions.__optional_keys__)
        account = self._account(code, options.get("who"))
        with account.telling():
            async with self._lock, self._sandbox.use() as (box, prepared):
                await self._sandbox.before_run()
                with Events() as events:
                    steps = self._run_code(box, prepared, code, events, account, options)
                    return await async_eventloop.drive(steps, events)

    async def close(self) -> None:
        """End the interpreter and what it has started."""
        self._hang_up()
        async with self._lock:
            self._let_go()
