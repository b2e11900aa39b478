"""`sandboxed`: make each call of a Python function in its own sandbox."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

import msgspec

import stockade
from stockade.errors import PolicyError, SetupError
from stockade.functions import packing, reply
from stockade.functions.channel import FunctionChannel
from stockade.functions.worker_start import OnExit, WorkerStarter, run_worker
from stockade.inside.channel_crypto import SealError
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.policy.values import size
from stockade.receipt.account import resolve_who
from stockade.receipt.statement import Who
from stockade.result import Result
from stockade.runs.io.eventloop import Events
from stockade.runs.io.streams import Sink
from stockade.runs.supervise import GRACE

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
#: How much of the host's memory a result may take.
MAX_RESULT = 512 << 20
#: From this many bytes on, a result is decoded in a thread and not in the event loop.
MANY = 1 << 16


class Call(NamedTuple):
    """One call: the function's value (a list of values, if it yields), and the result of its run."""

    value: Any
    result: Result


class CallOptions(TypedDict, total=False):
    """The keyword arguments that `sandboxed`, `SandboxExecutor` and `agent` share."""

    #: Seconds until the call ends with a `TimeoutError`, and from SIGTERM to SIGKILL then.
    timeout: float | None
    grace: float
    #: Accept any object as a result, by pickle: the function then controls the calling process.
    trust_results: bool
    #: Classes that may come back although no annotation names them; exceptions too.
    types: Iterable[type]
    #: How much of the caller's memory a result may take.
    max_result: int | str
    #: Another Python than the caller's.
    executable: str
    on_exit: OnExit
    who: Who | Mapping[str, str] | None
    on_stdout: Sink | None
    on_stderr: Sink | None
    #: Make each call in a copy of this template.
    warm: stockade.functions.WarmPython | None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options for the calls of one function."""

    start: WorkerStarter
    trust_results: bool = False
    types: tuple[type, ...] = ()
    max_result: int = MAX_RESULT
    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    #: Whether the one argument is a sequence of arguments for many calls.
    many: bool = False
    #: Whether the function is a stage of a pipeline: its value is dropped, and its traceback printed.
    prints: bool = False
    #: Called with each call that begins.
    begun: Callable[[FunctionChannel], None] | None = None

    def talk(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[FunctionChannel, reply.ReturnTypes]:
        """Pack a call; return its channel and the types that may come back."""
        function, args = packing.bound(packing.undecorated(function), args)
        streams = not self.many and is_stream(function)
        request = packing.pack(
            function, args, kwargs, initializer=self.initializer, trust=self.trust_results,
            most=self.max_result, many=self.many, streams=streams, prints=self.prints,
        )  # fmt: skip
        known = reply.declared_types(function, self.types)
        taken = reply.ReturnTypes(trust=self.trust_results, max_result=self.max_result, types=known)
        try:
            return FunctionChannel(request, self.max_result, streams=streams), taken
        except SealError as error:
            raise SetupError(f"the function did not run: {error}", stage="channel") from None


def options(
    policy: PolicyLike | None = None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    trust_results: bool = False,
    types: Iterable[type] = (),
    max_result: int | str = MAX_RESULT,
    executable: str = "",
    on_exit: OnExit = "keep",
    who: Who | Mapping[str, str] | None = None,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    warm: stockade.functions.WarmPython | None = None,
    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> Options:
    """Validate the caller's options and return them as a value."""
    if not isinstance(trust_results, bool):  # a text that means no would be true
        raise PolicyError(f"trust_results = {trust_results!r}: is not a bool", hint="write True or False")
    if on_exit not in get_args(OnExit):
        # No "commit": a function that raises has not finished, and its changes must not be committed.
        raise PolicyError(f"on_exit = {on_exit!r}: is not a known choice", hint='write "keep" or "discard"')
    if warm is not None and executable:
        raise PolicyError(
            f"executable = {executable!r}: a WarmPython already has an interpreter",
            hint="leave executable out, or write WarmPython(python=...)",
        )
    most = size("max_result", max_result)
    if policy is None and warm is not None:
        policy = warm.policy
    start = WorkerStarter(
        policy=policy_or_default(policy), who=resolve_who(who), timeout=timeout, grace=grace,
        executable=executable, warm=warm, on_exit=on_exit, on_stdout=on_stdout, on_stderr=on_stderr,
    )  # fmt: skip
    return Options(
        start=start, trust_results=trust_results, types=tuple(types), max_result=most or MAX_RESULT,
        initializer=initializer,
    )  # fmt: skip


def call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    **how: Unpack[CallOptions],
) -> Call:
    """Call a function in its own sandbox. `how` is as for `sandboxed`."""
    return make_call(function, args, kwargs or {}, options(policy, **how))


def stream(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    **how: Unpack[CallOptions],
) -> Stream:
    """Call a generator function in its own sandbox and return an iterator over what it yields."""
    return Stream(function, args, kwargs or {}, options(policy, **how))


def make_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
) -> Call:
    """Make one call and wait for it in this thread."""
    stream = Stream(function, args, kwargs, how, kept=True)
    values = list(stream)
    assert stream.result is not None
    return Call(values if is_stream(function) and not how.many else stream.value, stream.result)


async def make_call_async(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
) -> Call:
    """Make one call and wait for it in the event loop. Cancelling ends the call first."""
    stream = AsyncStream(function, args, kwargs, how, kept=True)
    values = [value async for value in stream]
    assert stream.result is not None
    return Call(values if is_stream(function) and not how.many else stream.value, stream.result)


def is_stream(function: Callable[..., Any]) -> bool:
    """Whether a function is a generator function."""
    function = packing.undecorated(function)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


class _CallState:
    """What is known about a call so far.

    It is separate from the stream, because the steps must not reference the stream: dropping the last
    reference to a stream ends its call at once.
    """

    def __init__(self, *, kept: bool) -> None:
        self.value: Any = None
        self.result: Result | None = None
        self.kept = kept  # the caller keeps all values, so `max_result` limits all of them together
        self.talk: FunctionChannel | None = None

    def begun(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options
    ) -> tuple[FunctionChannel, reply.ReplyBudget]:
        talk, taken = how.talk(function, args, kwargs)
        self.talk = talk
        if how.begun is not None:
            how.begun(talk)
        return talk, reply.ReplyBudget(taken, shared=self.kept)


class _StreamBase:
    """What `Stream` and `AsyncStream` share: everything but the waiting."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Options,
        *, kept: bool = False,
    ) -> None:  # fmt: skip
        self._state = _CallState(kept=kept)
        self._steps: Any = self._iterate(self._state, function, args, kwargs, how)
        _living.add(self)

    @property
    def value(self) -> Any:
        """The value that the function returned."""
        return self._state.value

    @property
    def result(self) -> Result | None:
        """The result of its run."""
        return self._state.result

    @staticmethod
    def _iterate(
        state: _CallState,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Any:
        raise NotImplementedError

    def _forget(self) -> None:
        """Detach a forked child from its parent's call; leak the steps: closing them ends the call."""
        if self._state.talk is not None:
            import ctypes

            self._state.talk.forget()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._steps))
            self._steps = _foreign()


_living: weakref.WeakSet[_StreamBase] = weakref.WeakSet()


def _foreign() -> Iterator[Any]:
    raise SetupError("the call belongs to the process that began it", stage="function")
    yield


def _forget_all() -> None:
    for stream in list(_living):
        stream._forget()


def _close_all() -> None:
    """Close all streams at exit, while the interpreter still works."""
    for stream in list(_living):
        if isinstance(stream, Stream):
            with contextlib.suppress(ValueError):  # another thread is executing it
                stream.close()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)


class Stream(_StreamBase, Iterator[Any]):
    """An iterator over what a function in a sandbox yields.

    The function waits until you ask for its next value. `value` and `result` are set after the last one.
    Closing the stream earlier ends the call; use `with` if you do not read it to its end.
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
    def _iterate(
        state: _CallState,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Generator[Any, None, None]:
        how = with_action(how, function)
        talk, budget = state.begun(function, args, kwargs, how)
        try:
            with Events() as events:
                steps, why = run_worker(how.start, talk, events), None
                try:
                    patience = next(steps)
                    while True:
                        try:
                            while talk.values and why is None:
                                yield budget.value(talk.values.popleft())
                            events.wait(patience)
                        except BaseException as error:
                            why, events.ready = why or error, []
                            patience = steps.throw(AbandonedCall() if _is_ours(error) else error)
                        else:
                            patience = next(steps)
                except StopIteration as done:
                    result: Result = done.value
                except AbandonedCall:
                    if why is None or isinstance(why, GeneratorExit):
                        return
                    raise why from None
            while talk.values and not talk.refused:
                yield budget.value(talk.values.popleft())
            state.value, state.result = budget.conclude(talk, result), result
        finally:
            state.talk = None
            talk.close()


class AsyncStream(_StreamBase, AsyncIterator[Any]):
    """An asynchronous iterator over what a function in a sandbox yields: `Stream` for `async for`."""

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
    async def _iterate(
        state: _CallState,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Options,
    ) -> Any:
        how = with_action(how, function)
        talk, budget = state.begun(function, args, kwargs, how)
        try:
            with Events() as events:
                steps, why = run_worker(how.start, talk, events), None
                try:
                    patience = next(steps)
                    while True:
                        try:
                            while talk.values and why is None:
                                yield await _decode(budget.value, talk.values.popleft())
                            await _ready(events, patience)
                        except BaseException as error:
                            why, events.ready = why or error, []
                            patience = steps.throw(AbandonedCall() if _is_ours(error) else error)
                        else:
                            patience = next(steps)
                except StopIteration as done:
                    result: Result = done.value
                except AbandonedCall:
                    if why is None or isinstance(why, GeneratorExit):
                        return
                    raise why from None
            while talk.values and not talk.refused:
                yield await _decode(budget.value, talk.values.popleft())
            last = bytearray() if talk.last is None else talk.last[1]
            state.value = await _decode(lambda _: budget.conclude(talk, result), last)
            state.result = result
        finally:
            state.talk = None
            talk.close()


class AbandonedCall(BaseException):
    """The caller does not want the rest: it closed the stream, or a value was refused.

    The steps must go on to clean up, which GeneratorExit forbids, and they must not take the refusal of a
    value for a refused start; so they get this exception instead of either.
    """


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, GeneratorExit | Exception)


async def _decode(decode: Callable[[bytearray], Any], content: bytearray) -> Any:
    """Decode the bytes; if they are many, in a thread, so that the event loop goes on."""
    if len(content) < MANY:
        return decode(content)
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, decode, content)


async def _ready(events: Events, patience: float | None) -> None:
    """Wait in the event loop, which watches our descriptor only while this coroutine waits."""
    import asyncio

    from stockade.runs.io import async_eventloop

    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    if not async_eventloop.watch(events.fileno(), ready.set):
        patience = async_eventloop.UNWATCHED if patience is None else min(patience, async_eventloop.UNWATCHED)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), 0 if events.busy else patience)
    finally:
        loop.remove_reader(events.fileno())
    events.wait(0)


def options_of(function: Callable[..., Any]) -> Options | None:
    """Return the options of a function that `sandboxed` made; None for any other."""
    return function._how if isinstance(function, SandboxedFunction) else None


def with_action(how: Options, function: Callable[..., Any]) -> Options:
    """Name the function as the action in the receipt, unless the caller has named another."""
    from stockade.receipt.statement import MOST_WORDS, Who, text

    name = getattr(function, "__qualname__", type(function).__qualname__)
    action = text(f"{getattr(function, '__module__', '')}.{name}"[:MOST_WORDS])
    who = resolve_who(how.start.who, Who(action=action)) or Who(action=action)
    return msgspec.structs.replace(how, start=msgspec.structs.replace(how.start, who=who))


class SandboxedFunction(Generic[P, R]):
    """A function that makes each call in its own sandbox; `sandboxed` makes it.

    A call returns what the function returns: a coroutine for an `async def`, an iterator for a generator.
    """

    __stockade__ = True

    def __init__(self, function: Callable[P, R], how: Options) -> None:
        functools.update_wrapper(self, packing.plain_function(function, "sandboxed"))
        self.__wrapped__ = function
        self._how = how
        self.policy = how.start.policy

    @overload
    def __get__(self, instance: None, owner: Any = None) -> SandboxedFunction[P, R]: ...

    @overload
    def __get__(
        self: SandboxedFunction[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> SandboxedFunction[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return SandboxedFunction(types.MethodType(self.__wrapped__, instance), self._how)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        value: Any
        function = self.__wrapped__
        if inspect.iscoroutinefunction(function):
            value = self.aio(*args, **kwargs)
        elif inspect.isasyncgenfunction(function):
            value = AsyncStream(function, args, kwargs, self._how)
        elif inspect.isgeneratorfunction(function):
            value = Stream(function, args, kwargs, self._how)
        else:
            value = self.call(*args, **kwargs).value
        return value  # type: ignore[no-any-return]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Call it, wait, and return the value and the `Result` with its receipt, usage and output."""
        return make_call(self.__wrapped__, args, kwargs, self._how)

    async def acall(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Call it as `call` does, with `await`."""
        return await make_call_async(self.__wrapped__, args, kwargs, self._how)

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call it with `await` and return the value, also if the function is not `async def`."""
        return (await self.acall(*args, **kwargs)).value

    def __repr__(self) -> str:
        return f"<sandboxed {self.__wrapped__!r}>"


@overload
def sandboxed(function: Callable[P, R], /, **how: Unpack[CallOptions]) -> SandboxedFunction[P, R]: ...


@overload
def sandboxed(
    policy: PolicyLike | None = None, **how: Unpack[CallOptions]
) -> Callable[[Callable[P, R]], SandboxedFunction[P, R]]: ...


def sandboxed(
    policy: Any = None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    trust_results: bool = False,
    types: Iterable[type] = (),
    max_result: int | str = MAX_RESULT,
    executable: str = "",
    on_exit: OnExit = "keep",
    who: Who | Mapping[str, str] | None = None,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    warm: stockade.functions.WarmPython | None = None,
) -> Any:
    """Decorate a function so that each call runs in its own sandbox.

    >>> import stockade
    >>> @stockade.sandboxed
    ... def total(numbers):
    ...     return sum(numbers)
    >>> total([1, 2, 3])
    6
    >>> total.call([4]).result.outcome
    <Outcome.EXITED: 'exited'>

    With options: `@sandboxed(Policy(limits={"wall": "10s"}), timeout=5)`.

    Arguments are pickled. Results are plain data: numbers, text, bytes, lists, tuples, dicts, sets, dates and
    times, Decimal, UUID, Path, the classes of `collections`, arrays of numpy, the namedtuples and enums of
    the function's module, and the dataclasses in its return annotation or in `types`. A result takes at most
    `max_result` of memory. `trust_results=True` accepts any object that can be pickled and trusts the
    sandbox: code that controls the function then controls this process.

    A builtin exception, or one in `types`, is raised again here, with `.traceback` and `.result`; any other
    becomes a `FunctionError`, which is a `CommandError`. A limit, a timeout or a wall that ends the call
    raises `LimitError`, `TimeoutError` or `DeniedError`. The output is in `.call(...).result`.

    With `warm`, a `WarmPython`, a call starts no interpreter: it runs in a copy of that template, and under
    its policy unless you pass another. docs/how-to/warm-python.md says what copies share.
    """
    bare = policy if callable(policy) or isinstance(policy, classmethod | staticmethod) else None
    how = options(
        None if bare is not None else policy, timeout=timeout, grace=grace, trust_results=trust_results,
        types=types, max_result=max_result, executable=executable, on_exit=on_exit, who=who,
        on_stdout=on_stdout, on_stderr=on_stderr, warm=warm,
    )  # fmt: skip
    if bare is not None:
        return SandboxedFunction(bare, how)
    return lambda function: SandboxedFunction(function, how)
