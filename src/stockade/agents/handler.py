"""`agent`: give a handler a name and run each of its calls in a sandbox under that name's policy.

The handler looks up the agent's row at each call, so that a switch takes
effect at the next call in every process. If the lookup fails, the call fails.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

import msgspec

import stockade
from stockade import state
from stockade.agents import policies, registry
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.receipt.statement import Who

P = ParamSpec("P")
R = TypeVar("R")

#: How many seconds a call may take, if neither the handler nor the agent's policy says.
TIMEOUT = 30.0
#: The function behind each agent's name in this process: its module and its qualified name.
_handlers: dict[str, tuple[str, str]] = {}


class Handler(Generic[P, R]):
    """A function that is an agent; `agent` makes it.

    A call returns what the function returns: a coroutine for an `async def`, an iterator for a generator.
    """

    __stockade__ = True

    def __init__(self, function: Callable[P, R], name: str, category: str, options: dict[str, Any]) -> None:
        from stockade.functions.packing import plain_function

        self.__wrapped__ = plain_function(function, "agent")
        self.name, self.category = registry.valid_name(name), category
        if category:
            registry.valid_name(category, "category")
        self._options = options
        functools.update_wrapper(self, function)
        if getattr(function, "__name__", "") == "<lambda>":
            raise PolicyError(
                f"the agent {name!r} is a lambda, and a lambda has no name of its own",
                hint="define it with `def` at the top of a module",
            )
        mine = (str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", name)))
        if _handlers.setdefault(name, mine) != mine:
            raise PolicyError(
                f"the name {name!r} belongs to the agent {'.'.join(_handlers[name])}; "
                f"{'.'.join(mine)} cannot have it too",
                hint="rename one of them: two agents never share a name",
            )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.__wrapped__
        value: Any
        if inspect.iscoroutinefunction(function):
            value = self._call_async(*args, **kwargs)
        else:
            value = self._current_callable()(*args, **kwargs)
        return value  # type: ignore[no-any-return]

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        return await self._current_callable()(*args, **kwargs)

    def _current_callable(self) -> Callable[..., Any]:
        """Return the function as this call is to run it: sandboxed, unless the agent is switched off."""
        caller = Caller.current()
        home = state.state_dir(caller.environ, caller.home)
        agent = registry.find_or_add(home, self.name, self.category)
        policies.agreed(agent, self.name, self.category)
        if not agent.enabled:
            return _UnsandboxedCall(self.__wrapped__, home, agent)
        from stockade.functions.sandboxed_function import SandboxedFunction, options

        found = policies.policy_for(agent, caller)
        default = TIMEOUT if found.policy.limits.wall is None else None
        given = {"timeout": default, "who": {"agent": agent.name, "category": agent.category}}
        how = options(found.policy, **given | self._options)
        start = msgspec.structs.replace(how.start, pinned=found.pinned)
        return SandboxedFunction(self.__wrapped__, msgspec.structs.replace(how, start=start))

    def __repr__(self) -> str:
        return f"<agent {self.name} {self.__wrapped__!r}>"


class _UnsandboxedCall:
    """A call of an agent whose sandbox is switched off: it runs in this process, and its receipt says so."""

    def __init__(self, function: Callable[..., Any], home: str, agent: registry.Agent) -> None:
        self._function, self._home, self._agent = function, home, agent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        for kind, way in (
            (inspect.iscoroutinefunction, self._call_async),
            (inspect.isasyncgenfunction, self._iterate_async),
            (inspect.isgeneratorfunction, self._iterate),
        ):
            if kind(function):
                return way(*args, **kwargs)
        with self._with_receipt():
            return function(*args, **kwargs)

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_receipt():
            return await self._function(*args, **kwargs)

    def _iterate(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_receipt():
            return (yield from self._function(*args, **kwargs))

    async def _iterate_async(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_receipt():
            async with contextlib.aclosing(self._function(*args, **kwargs)) as values:
                async for value in values:
                    yield value

    @contextlib.contextmanager
    def _with_receipt(self) -> Iterator[None]:
        """Write a record before the call and a receipt after it. Without the record the call does not run."""
        from stockade.receipt import builder

        agent, function = self._agent, self._function
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        who = Who(agent.name, agent.category, name)
        why = f"switched off: receipt {agent.place}"
        builder.begun(self._home, who, why)
        receipt = functools.partial(builder.unwalled, self._home, who, name, why, time.time())
        try:
            yield
        except BaseException as error:
            receipt(error)
            raise
        receipt(None)


def agent(
    name: str, *, category: str = "", **options: Unpack[stockade.functions.CallOptions]
) -> Callable[[Callable[P, R]], Handler[P, R]]:
    """Decorate a function so that each call runs in a sandbox under the policy of the named agent.

    >>> import stockade
    >>> @stockade.agent("treasurer")
    ... def total(numbers):
    ...     return sum(numbers)
    >>> total([1, 2, 3])
    6

    The registry and the layers decide the policy of the agent or of its category; `stockade agents` lists
    the agents. Only `stockade agents disable NAME --reason ...` lets the calls run without a sandbox, and
    their receipts say so. `options` are those of `sandboxed`, except `policy` and `who`.

    A call that takes longer than `timeout` seconds is ended and raises a `TimeoutError`. Without `timeout`,
    the agent's policy decides by `limits.wall`; if that says nothing either, a call has 30 seconds. With
    `timeout=None` only the policy limits it. A call without a sandbox has no time limit.
    """
    for taken in ("policy", "who"):
        if taken in options:
            raise PolicyError(
                f"{taken}: the registry decides it by the agent's name",
                hint=f"stockade agents add {name} ...",
            )
    return lambda function: Handler(function, name, category, {**options})
