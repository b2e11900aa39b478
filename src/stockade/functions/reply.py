"""Turn a worker's answer and the end of its sandbox into a value or an exception.

The gate and the kernel say how the run ended; the worker's answer counts only
if its interpreter ended by itself and properly. The answer is still that of
untrusted code: a value is plain data, an exception is a builtin one or one that
the caller has declared, and any other exception is described in text.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import pickle
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from stockade.errors import CommandError, LimitError, SetupError, StockadeError, one_line
from stockade.functions.channel import MOST_ERROR, FunctionChannel
from stockade.inside.encoder import NotPlainDataError
from stockade.policy.values import size_text
from stockade.result import Outcome, Result
from stockade.runs.decoder import Decoder, is_enum, is_namedtuple

#: Exceptions that would control the caller; no function inside may raise them outside.
NEVER = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
#: The stages that can fail before the function begins.
BEFORE = ("arguments", "initializer")
#: The longest name and text of an exception, in characters.
MOST_NAME, MOST_TEXT = 500, 1 << 20


class FunctionError(CommandError):
    """A function ended without an acceptable value.

    `type` is the name of the exception that ended it, if one did, and `traceback` its text; `stage` is
    "initializer", "function" or "result" then.
    """

    type = ""
    traceback = ""
    stage = ""


class WorkerDiedError(FunctionError):
    """The interpreter of a function ended before the function did."""


class RemoteError(Exception):
    """The traceback from inside, shown as the cause of the exception outside."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ReturnTypes(msgspec.Struct, frozen=True, kw_only=True):
    """What may come back: `types` are the classes that a reply may contain, by module and name."""

    trust: bool
    max_result: int
    types: dict[str, type]


def declared_types(function: Callable[..., Any], also: Iterable[type]) -> dict[str, type]:
    """Return the classes that may come back from a function, by the worker's names for them.

    Those are the dataclasses, namedtuples and enums in its return annotation and in `also`, exceptions in
    `also`, and the namedtuples and enums of its own module, which execute nothing when they are made.
    """
    found = {name_of(kind): kind for kind in _module_types(function)}
    hints, seen = list[Any](also), set[type]()
    with contextlib.suppress(Exception):  # annotations may be anything, and need not resolve
        hints.append(typing.get_type_hints(function).get("return"))
    while hints:
        hint = hints.pop()
        hints += typing.get_args(hint)
        hint = typing.get_origin(hint) or hint
        if not isinstance(hint, type) or hint in seen:
            continue
        seen.add(hint)
        if dataclasses.is_dataclass(hint) or is_namedtuple(hint):
            found[name_of(hint)] = hint
            try:
                hints += typing.get_type_hints(hint).values()
            except Exception:
                hints += getattr(hint, "__annotations__", {}).values()
        elif is_enum(hint) or issubclass(hint, Exception):
            found[name_of(hint)] = hint
    return found


def _module_types(function: Callable[..., Any]) -> Iterable[type]:
    """Return the namedtuples and enums among a function's globals."""
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    return [value for value in list(names.values()) if isinstance(value, type) and _is_inert(value)]


def _is_inert(kind: type) -> bool:
    """Whether making a value executes nothing: what derives from a namedtuple may have a constructor."""
    return is_enum(kind) or (is_namedtuple(kind) and tuple in kind.__bases__)


def name_of(kind: type) -> str:
    """Return the worker's name for a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


class ReplyBudget:
    """The memory left for the values of one call: for each value, or with `shared` for all together."""

    def __init__(self, taken: ReturnTypes, *, shared: bool) -> None:
        self._taken, self._shared, self._room = taken, shared, taken.max_result

    def value(self, content: bytearray) -> Any:
        """Decode a value, or raise why it is refused. With `trust_results` this can execute any code."""
        if self._taken.trust:
            return pickle.loads(content)
        decoder = Decoder(content, self._room, self._taken.types)
        try:
            value = decoder.whole()
        except OverflowError:
            raise too_large(self._taken.max_result) from None
        except NotPlainDataError as error:
            raise FunctionError(
                f"Stockade refused the function's result: {visible(str(error))}"
            ) from error.__cause__
        if self._shared:
            self._room = decoder.room
        return value

    def conclude(self, talk: FunctionChannel, result: Result) -> Any:
        """Return the function's value, or raise its exception with the result of the run attached."""
        error = _failure(talk, result, self._taken)
        if error is None:
            assert talk.last is not None
            try:
                return self.value(talk.last[1])
            except StockadeError as refused:
                error = refused
        if isinstance(error, StockadeError):
            error.receipt = result.receipt
        error.result = result  # type: ignore[attr-defined]
        raise error


def too_large(max_result: int) -> LimitError:
    """Return the error for a result that takes more than `max_result`."""
    return LimitError(
        f'the result takes more than max_result = "{size_text(max_result)}"',
        hint="let the function return less or write a file, or raise `max_result`",
    )


def _failure(talk: FunctionChannel, result: Result, taken: ReturnTypes) -> Exception | None:
    if talk.too_large:
        return too_large(taken.max_result)
    if talk.refused and result.outcome in (Outcome.EXITED, Outcome.CANCELLED):
        hint = "the Python inside needs libcrypto or `cryptography`" if "OpenSSL" in talk.refused else ""
        return FunctionError(f"Stockade refused the function's answer: {visible(talk.refused)}", hint=hint)
    if result.outcome is not Outcome.EXITED or talk.last is None:
        return _ended(result)
    kind, content = talk.last
    if result.exit_code != (0 if kind == b"R" else 1):
        return _ended(result)
    return raised(content, taken, begun=talk.begun) if kind == b"E" else None


def _ended(result: Result) -> Exception:
    """Return the error for a run that ended without an answer."""
    try:
        result.check()
    except CommandError as error:
        why = f"the interpreter of the function ended: {error.message}"
        return WorkerDiedError(why, hint=error.hint)
    except StockadeError as error:
        return error
    return WorkerDiedError("the interpreter of the function ended before the function did")


def raised(content: bytearray, taken: ReturnTypes, *, begun: bool) -> Exception:
    """Return the exception that ended the function, of the same type if that is known here.

    A function that has begun may claim that it has not; that claim is ignored.
    """
    try:
        record: Any = Decoder(content, MOST_ERROR).whole()
        name, message, text, stage = words = [record[key] for key in ("type", "message", "text", "stage")]
        if not all(isinstance(word, str) for word in words) or not isinstance(record["args"], bytes):
            raise TypeError
        args: Any = Decoder(record["args"], MOST_ERROR).whole() if record["args"] else None
    except (NotPlainDataError, OverflowError, TypeError, KeyError):
        return FunctionError("Stockade refused the function's answer: it is not a valid exception")
    if begun and stage in BEFORE:
        stage = "function"
    name, message, text = name[:MOST_NAME], message[:MOST_TEXT], visible(text[-MOST_TEXT:], keep="\n\t")
    error = _same_type(name, stage, args, taken) or _described(name, message, stage, taken)
    error.__cause__ = RemoteError(text)
    error.traceback = text  # type: ignore[attr-defined]
    return error


def _same_type(name: str, stage: str, args: Any, taken: ReturnTypes) -> Exception | None:
    """Return an exception of the same type with the same arguments, or None if that is not allowed."""
    module, _, plainly = name.partition(":")
    kind = vars(builtins).get(plainly) if module == "builtins" else taken.types.get(name)
    if stage != "function" or not isinstance(args, tuple) or not isinstance(kind, type):
        return None
    if not issubclass(kind, Exception) or issubclass(kind, NEVER):
        return None
    try:
        return kind(*args)
    except Exception:  # its constructor wants something else
        return None


def _described(name: str, message: str, stage: str, taken: ReturnTypes) -> StockadeError:
    """Return an error of Stockade that describes the exception in words."""
    kind = visible(name.rpartition(":")[2])
    words = one_line(visible(message))
    error: StockadeError
    if stage == "arguments":
        error = SetupError(
            f"the sandbox could not load the function: {kind}: {words}", stage="function",
            hint="install the modules that it needs inside, or import them at the top of its own module",
        )  # fmt: skip
    elif stage == "result" and kind == "OverflowError":
        error = too_large(taken.max_result)
    elif stage == "result":
        error = FunctionError(
            f"the function's result cannot be sent back: {words}",
            hint="return plain data (docs/how-to/functions.md), or trust the sandbox with trust_results=True",
        )
    else:
        where = "the initializer failed: " if stage == "initializer" else ""
        error = FunctionError(f"{where}{kind}: {words}" if words else f"{where}{kind}")
    if isinstance(error, FunctionError):
        error.type, error.stage = kind, stage
    return error


def visible(text: str, keep: str = "") -> str:
    """Escape text from inside so that it cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text
    )
