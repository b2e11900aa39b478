"""What a type checker knows about sandboxed functions; mypy checks it, nothing runs it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, assert_type

from stockade import Policy, sandboxed
from stockade.functions import Call, SandboxedFunction


@sandboxed
def bare(text: str, times: int = 1) -> str:
    """Without parentheses."""
    return text * times


@sandboxed(Policy(), timeout=3, max_result="1M", trust_results=False)
def with_options(text: str) -> int:
    """With options."""
    return len(text)


@sandboxed
async def later(x: int) -> int:
    """A coroutine."""
    return x


@sandboxed
def numbers(most: int) -> Iterator[int]:
    """A generator."""
    yield from range(most)


class Holder:
    """With a method."""

    @sandboxed
    def method(self, x: int) -> list[int]:
        """A method."""
        return [x]


def check() -> None:
    """Each call has the signature of its function, and each wrong one is an error."""
    assert_type(bare("a", times=2), str)
    assert_type(with_options("a"), int)
    _ = assert_type(later(1), Coroutine[Any, Any, int])
    assert_type(numbers(3), Iterator[int])
    assert_type(Holder().method(1), list[int])
    assert_type(bare.call("a"), Call)
    function: Callable[[str], int] = with_options
    decorated: SandboxedFunction[[str], int] = sandboxed(function, timeout=1)
    bare(1)  # type: ignore[arg-type]
    Holder().method("x")  # type: ignore[arg-type]
    sandboxed(timeut=1)  # type: ignore[call-overload]
    assert_type(decorated("x"), int)
