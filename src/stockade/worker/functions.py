"""`sandboxed`: a Python function whose every call is made in a sandbox of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.policy import Policy
from stockade.policy.values import size
from stockade.receipt.account import named
from stockade.sandbox.result import Result
from stockade.sandbox.steps import Events
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE
from stockade.worker import answer, carry
from stockade.worker.seal import SealError
from stockade.worker.start import OnExit, Start, once
from stockade.worker.talk import Talk

if TYPE_CHECKING:
    from stockade.receipt.statement import Who
    from stockade.worker.warm import WarmPython

P = ParamSpec("P")
R = TypeVar("R")
Results = Literal["plain", "pickle"]
#: What a result may take of the host's memory.
LARGEST = 512 << 20
#: So many bytes of a result are not decoded in an event loop.
MANY = 1 << 16


class Call(NamedTuple):
    """One call: what the function returned (a list of what it yielded, if it did), and how its run ended."""

    value: Any
    result: Result


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of one function are made."""

    start: Start
    results: Results = "plain"
    types: tuple[type, ...] = ()
    largest: int = LARGEST
    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    #: Whether the one argument is a sequence of arguments for many calls.
    many: bool = False
    #: Who wants to know of each call that begins.
    begun: Callable[[Talk], None] | None = None

    def talk(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Talk, answer.Taken]:
        """The call, packed, and what may come back of it."""
        function, args = carry.bound(carry.undecorated(function), args)
        streams = not self.many and is_stream(function)
        request = carry.pack(
            function, args, kwargs, initializer=self.initializer, results=self.results, most=self.largest,
            many=self.many, streams=streams,
        )  # fmt: skip
        known = answer.declared(function, self.types)
        taken = answer.Taken(results=self.results, largest=self.largest, types=known)
        try:
            return Talk(request, self.largest, streams=streams), taken
        except SealError as error:
            raise SetupError(f"nothing was run: {error}", stage="channel") from None


def options(
    policy: Policy | None = None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    results: Results = "plain",
    types: Iterable[type] = (),
    largest: int | str = LARGEST,
    executable: str = "",
    on_exit: OnExit = "keep",
    who: Who | Mapping[str, str] | None = None,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    warm: WarmPython | None = None,
    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> Options:
    """What the caller asks for, checked."""
    if results not in ("plain", "pickle"):
        raise PolicyError(f"results = {results!r}: is not a way", hint='write "plain" or "pickle"')
    if on_exit not in get_args(OnExit):
        # A function that raises has not finished, and what it did is not to be taken over.
        raise PolicyError(f"on_exit = {on_exit!r}: is not a way to end", hint='write "keep" or "discard"')
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError(
            f"policy = {policy!r}: is no Policy", hint="write @sandboxed(), or @sandboxed(Policy(...))"
        )
    if warm is not None and executable:
        raise PolicyError(f"executable = {executable!r}: a WarmPython has one", hint="WarmPython(python=...)")
    most = size("largest", largest)
    if policy is None:
        policy = Policy() if warm is None else warm.policy
    start = Start(
        policy=policy, who=named(who), timeout=timeout, grace=grace, executable=executable, warm=warm,
        on_exit=on_exit, on_stdout=on_stdout, on_stderr=on_stderr,
    )  # fmt: skip
    return Options(
        start=start, results=results, types=tuple(types), largest=most or LARGEST, initializer=initializer
    )


def call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    **how: Any,
) -> Call:
    """Call a function in a sandbox of its own. `how` is as for `sandboxed`."""
    return calling(function, args, kwargs or {}, options(policy, **how))


def stream(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    **how: Any,
) -> Stream:
    """Call a generator function in a sandbox of its own; what it yields comes as it is asked for."""
    return Stream(function, args, kwargs or {}, options(policy, **how))


def calling(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
) -> Call:
    """Make one call and wait for it in this thread."""
    stream = Stream(function, args, kwargs, how, kept=True)
    values = list(stream)
    assert stream.result is not None
    return Call(values if is_stream(function) and not how.many else stream.value, stream.result)


async def calling_async(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
) -> Call:
    """Make one call and wait for it in the event loop. A cancelled one is ended first."""
    stream = AsyncStream(function, args, kwargs, how, kept=True)
    values = [value async for value in stream]
    assert stream.result is not None
    return Call(values if is_stream(function) and not how.many else stream.value, stream.result)


def is_stream(function: Callable[..., Any]) -> bool:
    """Whether a function yields."""
    function = carry.undecorated(function)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


class _Told:
    """What is known of a call so far.

    Apart from the stream, which the steps must not hold: whoever lets go of a stream ends its call, at once.
    """

    def __init__(self, *, kept: bool) -> None:
        self.value: Any = None
        self.result: Result | None = None
        self.kept = kept  # somebody keeps all values: then `largest` is for all of them together
        self.talk: Talk | None = None

    def begun(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
    ) -> tuple[Talk, answer.Budget]:
        talk, taken = how.talk(function, args, kwargs)
        self.talk = talk
        if how.begun is not None:
            how.begun(talk)
        return talk, answer.Budget(taken, shared=self.kept)


class _Streaming:
    """What `Stream` and `AsyncStream` share: everything but the waiting."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options,
        *, kept: bool = False,
    ) -> None:  # fmt: skip
        self._told = _Told(kept=kept)
        self._steps: Any = self._running(self._told, function, args, kwargs, how)
        _living.add(self)

    @property
    def value(self) -> Any:
        """What the function returned."""
        return self._told.value

    @property
    def result(self) -> Result | None:
        """How its run ended."""
        return self._told.result

    @staticmethod
    def _running(
        told: _Told,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Any:
        raise NotImplementedError

    def _forget(self) -> None:
        """In a forked child: the call is the parent's, and what would end it must never run here."""
        if self._told.talk is not None:
            import ctypes

            self._told.talk.forget()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._steps))
            self._steps = _foreign()


_living: weakref.WeakSet[_Streaming] = weakref.WeakSet()


def _foreign() -> Iterator[Any]:
    raise SetupError("the call is that of the process that began it", stage="function")
    yield


def _forget_all() -> None:
    for stream in list(_living):
        stream._forget()


def _close_all() -> None:
    """At the end of the interpreter, while there still is one."""
    for stream in list(_living):
        if isinstance(stream, Stream):
            with contextlib.suppress(ValueError):  # another thread is in it
                stream.close()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)


class Stream(_Streaming, Iterator[Any]):
    """What a function in a sandbox yields, as it comes.

    The function goes on only as far as somebody asks for more. `value` and `result` are there after the
    last one; closed before, what still runs is ended. Use it in `with` where it is not read to its end.
    """

    def __next__(self) -> Any:
        return next(self._steps)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs of it."""
        self._steps.close()

    @staticmethod
    def _running(
        told: _Told,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Generator[Any, None, None]:
        how = _named(how, function)
        talk, budget = told.begun(function, args, kwargs, how)
        try:
            with Events() as events:
                steps, why = once(how.start, talk, events), None
                try:
                    patience = next(steps)
                    while True:
                        try:
                            while talk.values and why is None:
                                yield budget.value(talk.values.popleft())
                            events.wait(patience)
                        except BaseException as error:
                            why, events.ready = why or error, []
                            patience = steps.throw(NobodyWaits() if _is_ours(error) else error)
                        else:
                            patience = next(steps)
                except StopIteration as done:
                    result: Result = done.value
                except NobodyWaits:
                    if why is None or isinstance(why, GeneratorExit):
                        return
                    raise why from None
            while talk.values and not talk.refused:
                yield budget.value(talk.values.popleft())
            told.value, told.result = budget.concluded(talk, result), result
        finally:
            told.talk = None
            talk.close()


class AsyncStream(_Streaming, AsyncIterator[Any]):
    """What a function in a sandbox yields, for `async for`; as `Stream`."""

    async def __anext__(self) -> Any:
        return await anext(self._steps)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End what still runs of it."""
        await self._steps.aclose()

    @staticmethod
    async def _running(
        told: _Told,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Any:
        how = _named(how, function)
        talk, budget = told.begun(function, args, kwargs, how)
        try:
            with Events() as events:
                steps, why = once(how.start, talk, events), None
                try:
                    patience = next(steps)
                    while True:
                        try:
                            while talk.values and why is None:
                                yield await _decoded(budget.value, talk.values.popleft())
                            await _ready(events, patience)
                        except BaseException as error:
                            why, events.ready = why or error, []
                            patience = steps.throw(NobodyWaits() if _is_ours(error) else error)
                        else:
                            patience = next(steps)
                except StopIteration as done:
                    result: Result = done.value
                except NobodyWaits:
                    if why is None or isinstance(why, GeneratorExit):
                        return
                    raise why from None
            while talk.values and not talk.refused:
                yield await _decoded(budget.value, talk.values.popleft())
            last = bytearray() if talk.last is None else talk.last[1]
            told.value = await _decoded(lambda _: budget.concluded(talk, result), last)
            told.result = result
        finally:
            told.talk = None
            talk.close()


class NobodyWaits(BaseException):
    """Nobody wants the rest: it was closed, or a value was refused.

    A generator that is closed may not go on, so its steps are told in another word; and one whose value is
    refused was not refused its start.
    """


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, GeneratorExit | Exception)


async def _decoded(decode: Callable[[bytearray], Any], content: bytearray) -> Any:
    """What the bytes say; the event loop goes on while there are many."""
    if len(content) < MANY:
        return decode(content)
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, decode, content)


async def _ready(events: Events, patience: float | None) -> None:
    """Wait in the event loop, which looks at nothing of ours while nobody waits here."""
    import asyncio

    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(events.fileno(), ready.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), 0 if events.busy else patience)
    finally:
        loop.remove_reader(events.fileno())
    events.wait(0)


def _named(how: Options, function: Callable[..., Any]) -> Options:
    """The receipt says which function it was, unless the caller says something else."""
    from stockade.receipt.statement import MOST_WORDS, Who, text

    name = getattr(function, "__qualname__", type(function).__qualname__)
    action = text(f"{getattr(function, '__module__', '')}.{name}"[:MOST_WORDS])
    who = named(how.start.who, Who(action=action)) or Who(action=action)
    return msgspec.structs.replace(how, start=msgspec.structs.replace(how.start, who=who))


class Sandboxed(Generic[P, R]):
    """A function whose every call is made in a sandbox of its own; `sandboxed` makes it.

    Called, it returns what the function returns: a coroutine where that is `async def`, an iterator where it
    yields.
    """

    __stockade__ = True

    def __init__(self, function: Callable[P, R], how: Options) -> None:
        functools.update_wrapper(self, carry.checked(function, "sandboxed"))
        self.__wrapped__ = function
        self._how = how
        self.policy = how.start.policy

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return Sandboxed(types.MethodType(self.__wrapped__, instance), self._how)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        made: Any
        function = self.__wrapped__
        if inspect.iscoroutinefunction(function):
            made = self.aio(*args, **kwargs)
        elif inspect.isasyncgenfunction(function):
            made = AsyncStream(function, args, kwargs, self._how)
        elif inspect.isgeneratorfunction(function):
            made = Stream(function, args, kwargs, self._how)
        else:
            made = self.call(*args, **kwargs).value
        return made  # type: ignore[no-any-return]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Call it and wait: the value, and the `Result` with its receipt, usage and what was printed."""
        return calling(self.__wrapped__, args, kwargs, self._how)

    async def acall(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """As `call`, with `await`."""
        return await calling_async(self.__wrapped__, args, kwargs, self._how)

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The value, with `await`; also of a function that is not `async def`."""
        return (await self.acall(*args, **kwargs)).value

    def __repr__(self) -> str:
        return f"<sandboxed {self.__wrapped__!r}>"


def sandboxed(
    policy: Policy | None = None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    results: Results = "plain",
    types: Iterable[type] = (),
    largest: int | str = LARGEST,
    executable: str = "",
    on_exit: OnExit = "keep",
    who: Who | Mapping[str, str] | None = None,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    warm: WarmPython | None = None,
) -> Callable[[Callable[P, R]], Sandboxed[P, R]]:
    """A decorator: every call of the function is made in a sandbox of its own.

    >>> import stockade
    >>> @stockade.sandboxed(stockade.Policy(limits={"wall": "10s"}))
    ... def total(numbers):
    ...     return sum(numbers)
    >>> total([1, 2, 3])
    6
    >>> total.call([4]).result.outcome
    <Outcome.EXITED: 'exited'>

    Arguments are pickled in. What comes back is plain data: numbers, text, bytes, lists, tuples, dicts,
    sets, and the dataclasses that the function is annotated to return or that `types` names. It takes at
    most `largest` of memory. `results="pickle"` takes anything, and trusts the sandbox: whoever controls
    the function then controls this process.

    An exception comes back as the same builtin one, or one that `types` names, with `.traceback` and
    `.result`; any other is a `CommandError`. A limit, a time or a wall that ends the call raises
    `LimitError`, `TimeoutError` or `DeniedError`. What is printed is in `.call(...).result`.

    With `warm`, a `WarmPython`, no interpreter is started for a call: it is made in a copy of that one, and
    under its policy if there is no other. What copies share is in docs/warm-python.md.
    """
    how = options(
        policy, timeout=timeout, grace=grace, results=results, types=types, largest=largest,
        executable=executable, on_exit=on_exit, who=who, on_stdout=on_stdout, on_stderr=on_stderr, warm=warm,
    )  # fmt: skip
    return lambda function: Sandboxed(function, how)
