"""From what a worker said, and how its sandbox ended, to a value or an exception.

How it ended is what the gate and the kernel say; only where the interpreter
ended by itself and properly does its word count. It is the word of untrusted
code all the same: a value is data, an exception is a builtin one or one that
the caller has declared, and anything else is told in text.
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
from stockade.policy.values import size_text
from stockade.sandbox.result import Outcome, Result
from stockade.worker import plain
from stockade.worker.talk import Talk

#: These mean something to whoever calls that no function inside may say.
NEVER = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
#: What can fail before the function begins.
BEFORE = ("arguments", "initializer")
#: What is shown of an exception at most, in characters.
MOST_NAME, MOST_TEXT = 500, 1 << 20


class FunctionError(CommandError):
    """A function ended without a value that can be taken.

    `type` is the name of the exception that ended it, if one did, and `traceback` its text; `stage` is
    "initializer", "function" or "result" then.
    """

    type = ""
    traceback = ""
    stage = ""


class WorkerDiedError(FunctionError):
    """The interpreter of a function ended before the function did."""


class RemoteError(Exception):
    """Shows the traceback from inside, as the cause of the exception that is raised outside."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What may come back: `types` are the classes that are made, by module and name."""

    results: str
    largest: int
    types: dict[str, type]


def declared(function: Callable[..., Any], also: Iterable[type]) -> dict[str, type]:
    """The dataclasses of what a function says that it returns, and what else is named."""
    found: dict[str, type] = {}
    hints: list[Any] = list(also)
    with contextlib.suppress(Exception):  # annotations are anything, and need not be true
        hints.append(typing.get_type_hints(function).get("return"))
    while hints:
        hint = hints.pop()
        hints += typing.get_args(hint)
        hint = typing.get_origin(hint) or hint
        if not isinstance(hint, type) or name_of(hint) in found:
            continue
        if dataclasses.is_dataclass(hint):
            found[name_of(hint)] = hint
            try:
                hints += typing.get_type_hints(hint).values()
            except Exception:
                hints += [field.type for field in dataclasses.fields(hint)]
        elif issubclass(hint, Exception):
            found[name_of(hint)] = hint
    return found


def name_of(kind: type) -> str:
    """What a class is called by the worker."""
    return f"{kind.__module__}:{kind.__qualname__}"


class Budget:
    """The values of one call, and what memory is left for them: for each, or if `shared` for all together."""

    def __init__(self, taken: Taken, *, shared: bool) -> None:
        self._taken, self._shared, self._room = taken, shared, taken.largest
        self._records = {name: kind for name, kind in taken.types.items() if dataclasses.is_dataclass(kind)}

    def value(self, content: bytearray) -> Any:
        """A value that was said, or why it is refused. With results="pickle" this executes what was said."""
        if self._taken.results == "pickle":
            return pickle.loads(content)
        decoder = plain.Decoder(content, self._room, self._records)
        try:
            value = decoder.whole()
        except OverflowError:
            raise too_large(self._taken.largest) from None
        except plain.NotPlainError as error:
            raise FunctionError(f"the result was refused: {visible(str(error))}") from error.__cause__
        if self._shared:
            self._room = decoder.room
        return value

    def concluded(self, talk: Talk, result: Result) -> Any:
        """The function's last word; or the exception is raised, with the result."""
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


def too_large(largest: int) -> LimitError:
    """The result takes more than it may."""
    return LimitError(
        f'the result takes more than largest = "{size_text(largest)}"',
        hint="let it return less, write a file, or raise `largest`",
    )


def _failure(talk: Talk, result: Result, taken: Taken) -> Exception | None:
    if talk.too_large:
        return too_large(taken.largest)
    if talk.refused and result.outcome in (Outcome.EXITED, Outcome.CANCELLED):
        hint = "the Python inside needs libcrypto or `cryptography`" if "OpenSSL" in talk.refused else ""
        return FunctionError(f"the answer was refused: {visible(talk.refused)}", hint=hint)
    if result.outcome is not Outcome.EXITED or talk.last is None:
        return _ended(result)
    kind, content = talk.last
    if result.exit_code != (0 if kind == b"R" else 1):
        return _ended(result)
    return raised(content, taken, begun=talk.begun) if kind == b"E" else None


def _ended(result: Result) -> Exception:
    """Why there is no answer at all."""
    try:
        result.check()
    except CommandError as error:
        why = f"the interpreter of the function ended: {error.message}"
        return WorkerDiedError(why, hint=error.hint)
    except StockadeError as error:
        return error
    return WorkerDiedError("the interpreter of the function ended before it did")


def raised(content: bytearray, taken: Taken, *, begun: bool) -> Exception:
    """The exception that ended the function: of its own type where that is known here.

    A function that has begun can say that it has not, and nobody believes it.
    """
    try:
        said: Any = plain.Decoder(content, 16 << 20).whole()
        name, message, text, stage = words = [said[key] for key in ("type", "message", "text", "stage")]
        if not all(isinstance(word, str) for word in words) or not isinstance(said["args"], bytes):
            raise TypeError
        args: Any = plain.Decoder(said["args"], 16 << 20).whole() if said["args"] else None
    except (plain.NotPlainError, OverflowError, TypeError, KeyError):
        return FunctionError("the answer was refused: it is no exception")
    if begun and stage in BEFORE:
        stage = "function"
    name, message, text = name[:MOST_NAME], message[:MOST_TEXT], visible(text[-MOST_TEXT:], keep="\n\t")
    error = _like(name, stage, args, taken) or _told(name, message, stage, taken)
    error.__cause__ = RemoteError(text)
    error.traceback = text  # type: ignore[attr-defined]
    return error


def _like(name: str, stage: str, args: Any, taken: Taken) -> Exception | None:
    """An exception of the same type and with the same arguments, if it may be made."""
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


def _told(name: str, message: str, stage: str, taken: Taken) -> StockadeError:
    """The exception in words."""
    kind = visible(name.rpartition(":")[2])
    words = one_line(visible(message))
    error: StockadeError
    if stage == "arguments":
        error = SetupError(
            f"the function could not be read inside: {kind}: {words}", stage="function",
            hint="modules that are neither installed nor imported here are not there: import them at the top",
        )  # fmt: skip
    elif stage == "result" and kind == "OverflowError":
        error = too_large(taken.largest)
    elif stage == "result":
        error = FunctionError(
            f"the result cannot come back: {words}",
            hint='return plain data, or trust the sandbox: results="pickle"',
        )
    else:
        where = "the initializer failed: " if stage == "initializer" else ""
        error = FunctionError(f"{where}{kind}: {words}" if words else f"{where}{kind}")
    if isinstance(error, FunctionError):
        error.type, error.stage = kind, stage
    return error


def visible(text: str, keep: str = "") -> str:
    """Text from inside that cannot drive a terminal."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text
    )
