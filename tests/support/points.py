"""Dataclasses, and functions that return them, to be called inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass
class Point:
    """What a function may return if it says so."""

    x: Any
    y: Point | None = None
    made: int = field(default=7, init=False)


@dataclass
class Trap:
    """A class that does something when it is made."""

    path: str

    def __post_init__(self) -> None:
        with open(self.path, "w") as file:
            file.write("sprung")


@dataclass
class Box(Generic[T]):
    """Of whatever it is."""

    content: T


class Pair(NamedTuple):
    """What a function may return without saying so."""

    first: Any
    second: Any


class Colour(Enum):
    """Likewise."""

    RED = "red"


class Way(Flag):
    """Two ways, which can be taken together."""

    UP = 1
    LEFT = 2


def named(x: int):  # type: ignore[no-untyped-def]
    """Values of classes of this module."""
    return [Pair(x, Colour.RED), Way.UP | Way.LEFT]


def boxed(x: int) -> Box[int]:
    """One in a box."""
    return Box(x)


def moved(point: Point, by: int) -> list[Point]:
    """A point and where it was."""
    return [Point(point.x + by, point)]


def unsaid(x: int):  # type: ignore[no-untyped-def]
    """A dataclass that no annotation tells of."""
    return Point(x)


def sprung(path: str) -> Point:
    """Not what was announced."""
    trap: Any = Trap.__new__(Trap)
    trap.path = path
    return trap  # type: ignore[no-any-return]
