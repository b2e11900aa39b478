"""Handlers that are agents, of every kind: in a module that can be handed in."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator

import stockade


@stockade.agent("adder", category="math")
def adder(*numbers: int) -> tuple[int, int]:
    return sum(numbers), os.getpid()


@stockade.agent("adder-2")
def other(*numbers: int) -> tuple[int, int]:
    return sum(numbers), os.getpid()


@stockade.agent("counter")
def counter(most: int) -> Iterator[int]:
    for number in range(most):
        yield os.getpid() if number == 0 else number


@stockade.agent("waiter")
async def waiter(value: int) -> tuple[int, int]:
    await asyncio.sleep(0)
    return value, os.getpid()


@stockade.agent("later")
async def later(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield os.getpid() if number == 0 else number


@stockade.agent("talker")
def talker(size: int) -> str:
    return "x" * size


@stockade.agent("sleeper")
def sleeper() -> None:
    time.sleep(600)


@stockade.agent("patient", timeout=None)
def patient(seconds: float) -> None:
    time.sleep(seconds)


@stockade.agent("hurried", timeout=0.5)
def hurried() -> None:
    time.sleep(600)


@stockade.agent("dripping")
def dripping() -> Iterator[int]:
    yield 1
    time.sleep(600)


@stockade.agent("failing")
def failing(path: str) -> str:
    with open(path, "r+b") as file:
        return str(file.read(16))


@stockade.agent("leaver")
def leaver(path: str) -> None:
    with open(path, "w"):
        os._exit(0)


class Keeper:
    factor = 3

    @stockade.agent("method")
    def times(self, number: int) -> int:
        return number * self.factor

    @classmethod
    @stockade.agent("class-method")
    def thrice(cls, number: int) -> int:
        return number * cls.factor
