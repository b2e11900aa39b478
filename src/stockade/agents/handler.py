"""`agent`: a handler that has a name, and whose every call runs in a sandbox under that name's policy.

How the agent stands is looked up at each call, so that a switch counts from
the next call on, in every process. What cannot be looked up is not run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from stockade import state
from stockade.agents import policies, registry
from stockade.errors import PolicyError
from stockade.policy import Caller
from stockade.receipt.statement import Who

P = ParamSpec("P")
R = TypeVar("R")

#: Whose each name is in this process: its module and its own name there.
_handlers: dict[str, tuple[str, str]] = {}


class Handler(Generic[P, R]):
    """A function that is an agent; `agent` makes it.

    Called, it returns what the function returns: a coroutine where that is `async def`, an iterator where it
    yields.
    """

    __stockade__ = True

    def __init__(self, function: Callable[P, R], name: str, category: str, options: dict[str, Any]) -> None:
        from stockade.worker.carry import checked

        self.__wrapped__ = checked(function, "agent")
        self.name, self.category = registry.checked(name), category
        if category:
            registry.checked(category, "category")
        self._options = options
        functools.update_wrapper(self, function)
        if getattr(function, "__name__", "") == "<lambda>":
            raise PolicyError(
                f"the agent {name!r} is a lambda, which has no name that tells it from others",
                hint="define it with `def` at the top of a module",
            )
        mine = (str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", name)))
        if _handlers.setdefault(name, mine) != mine:
            raise PolicyError(
                f"the agent {name!r} is {'.'.join(_handlers[name])}, and {'.'.join(mine)} would be another",
                hint="two agents never share a name: call one of them something else",
            )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.__wrapped__
        made: Any
        if inspect.iscoroutinefunction(function):
            made = self._awaited(*args, **kwargs)
        else:
            made = self._chosen()(*args, **kwargs)
        return made  # type: ignore[no-any-return]

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        return await self._chosen()(*args, **kwargs)

    def _chosen(self) -> Callable[..., Any]:
        """The function as the agent stands now: sandboxed, unless it was switched off."""
        caller = Caller.current()
        home = state.state_dir(caller.environ, caller.home)
        agent = registry.enter(home, self.name, self.category)
        policies.agreed(agent, self.name, self.category)
        if not agent.enabled:
            return _Bare(self.__wrapped__, home, agent)
        from stockade.worker.functions import Sandboxed, options

        found = policies.policy_for(agent, caller)
        how = options(found.policy, who={"agent": agent.name, "category": agent.category}, **self._options)
        start = msgspec.structs.replace(how.start, pinned=found.pinned)
        return Sandboxed(self.__wrapped__, msgspec.structs.replace(how, start=start))

    def __repr__(self) -> str:
        return f"<agent {self.name} {self.__wrapped__!r}>"


class _Bare:
    """A handler of an agent whose sandbox is off: it runs here, and its receipt says so."""

    def __init__(self, function: Callable[..., Any], home: str, agent: registry.Agent) -> None:
        self._function, self._home, self._agent = function, home, agent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        for kind, way in (
            (inspect.iscoroutinefunction, self._awaited),
            (inspect.isasyncgenfunction, self._yielded_later),
            (inspect.isgeneratorfunction, self._yielded),
        ):
            if kind(function):
                return way(*args, **kwargs)
        with self._recorded():
            return function(*args, **kwargs)

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorded():
            return await self._function(*args, **kwargs)

    def _yielded(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorded():
            return (yield from self._function(*args, **kwargs))

    async def _yielded_later(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorded():
            async with contextlib.aclosing(self._function(*args, **kwargs)) as values:
                async for value in values:
                    yield value

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Leave a record before and a receipt after. Where the first cannot be made, nothing is run."""
        from stockade.receipt import making

        agent, function = self._agent, self._function
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        who = Who(agent.name, agent.category, name)
        why = f"switched off: receipt {agent.place}"
        making.begun(self._home, who, why)
        receipt = functools.partial(making.unwalled, self._home, who, name, why, time.time())
        try:
            yield
        except BaseException as error:
            receipt(error)
            raise
        receipt(None)


def agent(name: str, *, category: str = "", **options: Any) -> Callable[[Callable[P, R]], Handler[P, R]]:
    """A decorator: every call of the function runs in a sandbox under the policy of the agent of that name.

    >>> import stockade
    >>> @stockade.agent("treasurer")
    ... def total(numbers):
    ...     return sum(numbers)
    >>> total([1, 2, 3])
    6

    The policy is what the registry and the layers give the agent, or its category; `stockade agents` lists
    them. Only `stockade agents disable NAME --reason ...` lets its calls run without a sandbox, and their
    receipts say so. `options` are those of `sandboxed`, besides the policy and `who`.
    """
    for taken in ("policy", "who"):
        if taken in options:
            raise PolicyError(f"{taken}: the agent's name decides it", hint=f"stockade agents add {name} ...")
    return lambda function: Handler(function, name, category, options)
