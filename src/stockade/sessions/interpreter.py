"""`Interpreter`: one Python in a living sandbox; its variables stay from run to run."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.gate.template import TemplateArgv
from stockade.gate.wire import EXEC_MAX_SIZE
from stockade.receipt.account import Account
from stockade.receipt.statement import Who
from stockade.result import Outcome, Result
from stockade.runs.command import command
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.io.streams import Sink
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.prepare import RunPreparation
from stockade.runs.supervise import GRACE, Run
from stockade.sessions.exchange import DriverReply
from stockade.sessions.session import AsyncLivingSandbox, LivingSandbox, Session

#: How many bytes an answer may have beyond its content, which `limits.output` bounds. The supervisor ends a
#: driver that sends more.
WORDS = 1 << 20
#: How many lists, tuples and dictionaries an answer may have; how many keys of a kind whose hashes can be
#: made to collide; how many frames a traceback.
MOST_PARTS, FEW, MOST_FRAMES = 100_000, 1000, 100
#: A driver counts at least so many bytes for each value, so an answer with more values is forged.
LEAST_BYTES = 16
#: Everything before the next JSON sign that begins or separates a value, and the sign; signs in strings do
#: not count.
_SIGN = re.compile(rb'(?:"(?:[^"\\]++|\\.)*+"|[^",:\[{]++)*+([,:\[{])', re.DOTALL)
#: The longest answer of a driver that could not load a module.
MOST_REASON = 1 << 16
#: The system's Python; in a sandbox of a `WarmPython`, a copy of its template.
DEFAULT = "python3"
#: Reads the driver's source from descriptor 3 and executes it.
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

    #: The value of the last line, if that is an expression: plain data (numbers, text, bytes, lists, tuples,
    #: dicts), or an `OpaqueValue` for anything else.
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

    text = files("stockade.inside").joinpath("python_session.py").read_bytes()
    return b"%09d" % len(text) + text


def _decode(encoded: object, depth: int = 0) -> Any:
    """Decode a value that the driver encoded; raise a ValueError for anything else."""
    if encoded is None or isinstance(encoded, bool | int | float | str):
        return encoded
    if depth > 100:
        raise ValueError("too deep")
    if isinstance(encoded, list):
        return [_decode(part, depth + 1) for part in encoded]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise ValueError("not a value")
    ((letter, content),) = encoded.items()
    if letter == "b":
        return base64.b64decode(content, validate=True)
    if letter == "o":
        return OpaqueValue(*map(str, content[:2]))
    parts = _decode(content, depth + 1) if isinstance(content, list) else []
    if letter == "t":
        return tuple(parts)
    if letter != "d" or (len(parts) > 2 * FEW and any(map(_is_costly, parts[::2]))):
        raise ValueError("not a value")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _is_costly(key: object) -> bool:
    """Whether the program can choose many such keys with one hash, which makes a dictionary quadratic."""
    return not isinstance(key, str | bytes) and not (isinstance(key, int) and abs(key) < 1 << 53)


def _displays(report: object) -> Iterable[dict[str, str | bytes]]:
    for forms in report if isinstance(report, list) else ():
        found = {mime: _decode(form) for mime, form in forms.items()}
        yield {mime: form for mime, form in found.items() if isinstance(form, str | bytes)}


def _failure(report: Any) -> Failure | None:
    if report is None:
        return None
    frames = tuple(Frame(str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in report["frames"][-MOST_FRAMES:])
    return Failure(str(report["type"]), str(report["message"]), frames)


def _with_report(result: Result, reply: DriverReply | None, most: int) -> CodeResult:
    """Add the interpreter's report to the result, as far as it can be read."""
    fields: dict[str, Any] = {name: getattr(result, name) for name in result.__struct_fields__}
    if reply is None:
        return CodeResult(**fields)
    try:
        report = _parse(reply, most)
        if report.get("preload"):
            return CodeResult(**fields)
        return CodeResult(
            **fields,
            value=_decode(report.get("value")),
            displays=tuple(_displays(report.get("displays"))),
            error=_failure(report.get("error")),
            left_out=int(report.get("left_out", 0)),
        )
    except UNREADABLE:
        return CodeResult(**fields, left_out=1)


#: What reading a malformed answer raises.
UNREADABLE = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _parse(reply: DriverReply, most: int) -> Any:
    """Parse an answer; raise a ValueError if it would take many times its size in memory."""
    if _is_crowded(reply.content, most // LEAST_BYTES):
        raise ValueError("the answer would take many times its size in memory")
    return json.loads(reply.content)


def _is_crowded(content: bytes | bytearray, values: int) -> bool:
    """Whether JSON has more than `values` values, or more lists and keys than an answer may have."""
    parts, keys = MOST_PARTS, 2 * MOST_PARTS
    if (
        content.count(b"[") + content.count(b"{") <= parts
        and content.count(b",") <= values
        and content.count(b":") <= keys
    ):
        return False
    # In a driver's honest answer most of those signs lie in strings, which do not count.
    end = 0
    while min(parts, keys, values) >= 0:
        if (found := _SIGN.match(content, end)) is None:
            return False
        end = found.end()
        if found[1] == b",":
            values -= 1
        elif found[1] == b":":
            keys -= 1
        else:
            # A value that JSON cannot name is spelled with two more signs.
            parts, values = parts - 1, values + 2
    return True


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
        *,
        given: bytes,
        timeout: float | None,
        grace: float,
        on_stdout: Sink | None,
        on_stderr: Sink | None,
    ) -> Steps[CodeResult]:
        words = [self._executable, "-u", "-c", BOOT]
        if prepared.template is not None and self._executable == DEFAULT:
            words = TemplateArgv([prepared.template.argv[0], "-c", BOOT], prepared.template)
        driver = command(prepared, words, env=None, cwd=None, timeout=None, kept=True)
        run: Run = command(
            prepared, words, given=given, env=None, cwd=None, timeout=timeout, grace=grace,
            on_stdout=on_stdout, on_stderr=on_stderr, kept=True,
        )  # fmt: skip
        number = os.urandom(12).hex()
        request = self._request(code, number, run.limit)
        reply, result = yield from self._run_on_driver(
            box, prepared, driver, run, request, number.encode(), run.limit * 2 + WORDS, events, account
        )
        answer = _with_report(result, reply, run.limit)
        if answer.outcome is Outcome.SETUP_FAILED:
            self._let_go()
        return answer

    def _revise(self, result: Result, reply: DriverReply | None) -> Result:
        """Turn the report of a failed preload into a setup failure: the code has not run."""
        # A driver that cannot begin reports nothing else.
        if reply is None or not reply.content.startswith(b'{"preload":') or len(reply.content) > MOST_REASON:
            return result
        try:
            preload = json.loads(reply.content)["preload"]
        except UNREADABLE:
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
    ) -> CodeResult:
        """Run code in the interpreter. After the timeout it gets a KeyboardInterrupt."""
        account = self._account(code, who)
        with account.telling(), self._lock:
            self._sandbox.before_run()
            with self._sandbox.use() as (box, prepared), Events() as events:
                steps = self._run_code(
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
    ) -> CodeResult:
        """Run code in the interpreter, as `Interpreter.run` does."""
        from stockade.runs.io import async_eventloop

        account = self._account(code, who)
        with account.telling():
            async with self._lock, self._sandbox.use() as (box, prepared):
                await self._sandbox.before_run()
                with Events() as events:
                    steps = self._run_code(
                        box, prepared, code, events, account, given=input, timeout=timeout, grace=grace,
                        on_stdout=on_stdout, on_stderr=on_stderr,
                    )  # fmt: skip
                    return await async_eventloop.drive(steps, events)

    async def close(self) -> None:
        """End the interpreter and what it has started."""
        self._hang_up()
        async with self._lock:
            self._let_go()
