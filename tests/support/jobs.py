"""Functions that tests call inside. The module is sent there, so it imports little."""

from __future__ import annotations

import builtins
import os
import sys
import time

import stockade

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator
    from typing import Any

STATE = {"ready": False}


class OwnError(Exception):
    """An exception that only this module knows."""


class Bomb:
    """Pickled, it executes a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def echo(value: Any) -> Any:
    """The value, as it came."""
    return value


def add(a: int, b: int = 1) -> int:
    """Prints and adds."""
    print("adding")
    return a + b


def sized(count: int) -> bytes:
    """So many bytes."""
    return bytes(count)


def world() -> tuple[bool, list[str], bool]:
    """Whether numpy is there unasked, how Python was started, and whether it looks here first."""
    return "numpy" in sys.modules, sys.argv, "" in sys.path


def fail(kind: str, *args: Any) -> None:
    """Raise what is asked for."""
    kinds: dict[str, type[BaseException]] = {"own": OwnError, "exit": SystemExit, "stop": StopIteration}
    raise (kinds.get(kind) or getattr(builtins, kind))(*args)


def missing(path: str) -> str:
    """What no policy grants."""
    with open(path) as file:
        return file.read()


def count(most: int) -> Generator[int, None, int]:
    """Numbers, one after the other."""
    yield from range(most)
    return most


def generated() -> Any:
    """A generator, of which nobody could know."""
    return (number for number in range(3))


async def later(value: Any) -> Any:
    """The value, after a moment."""
    import asyncio

    await asyncio.sleep(0.01)
    return value


async def counted(most: int) -> AsyncIterator[int]:
    """Numbers, for `async for`."""
    for number in range(most):
        yield number


def die(status: int = 9) -> None:
    """Leave without a word."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(status)


def signalled(number: int) -> None:
    """End by a signal, as a wall would end it."""
    os.kill(os.getpid(), number)
    spin()


def spin(seconds: float = 60.0) -> None:
    """Take a while."""
    time.sleep(seconds)


def eat(megabytes: int) -> int:
    """Use memory."""
    return len(bytearray(os.urandom(1) * (megabytes << 20)))


def forked() -> int:
    """The child returns as well."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 1 if pid else 2


def make_ready(word: str) -> None:
    """What an initializer does."""
    STATE["ready"] = word == "ready"


def is_ready() -> bool:
    """Whether it did."""
    return STATE["ready"]


def _holds(path: str, keys: list[bytes]) -> bool:
    with open(path, "rb") as file:
        content = file.read()
    return any(key in content or key.hex().encode() in content for key in keys)


def seen() -> dict[str, Any]:
    """What a function can see of how it was called."""
    import gc

    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/environ", "rb") as around:
        told = {"argv": line.read(), "environ": around.read()}
    ours = [value for value in gc.get_objects() if type(value).__name__ in ("Sealer", "Opener")]
    keys = [value._cipher._key for value in ours]
    files = []
    for place in ("/tmp", os.environ["HOME"], "/dev/shm", "/run"):
        for parent, _, names in os.walk(place):
            if os.access(parent, os.W_OK):  # else it is an install, read-only
                files += [path for name in names if _holds(path := os.path.join(parent, name), keys)]
    return {
        **told,
        "keys": keys,
        "files": files,
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    }


def _worker() -> Any:
    """The worker that this runs in: hostile code finds it too."""
    frame: Any = sys._getframe()
    while "self" not in frame.f_locals or not hasattr(frame.f_locals["self"], "sealer"):
        frame = frame.f_back
    return frame.f_locals["self"]


def hostile(what: str, data: bytes = b"") -> Any:
    """Code that speaks for its worker."""
    worker = _worker()
    if what == "raw":
        worker.write(data)
    elif what == "record":
        worker.send(data[:1], data[1:])
    elif what == "after":

        def stay(status: int) -> None:
            worker.send(b"R", data)
            spin()

        worker.leave = stay
    elif what == "failed":  # an exception of its own
        worker.send(b"E", data)
        os._exit(1)
    elif what == "early":  # an answer of its own, then another one
        worker.send(b"R", data)
        os._exit(0)
    elif what == "pickle":
        worker.send(b"R", __import__("pickle").dumps(Bomb(data.decode()), 4))
        os._exit(0)
    return "honest"


@stockade.sandboxed(stockade.Policy(limits={"wall": "60s"}))
def decorated(x: int) -> int:
    """Decorated where it is defined."""
    return x * 2


class Greeter:
    """With a method that runs in a sandbox."""

    def __init__(self, word: str) -> None:
        self.word = word

    @stockade.sandboxed()
    def greet(self, name: str) -> str:
        """Greet somebody."""
        return f"{self.word} {name}"

    @classmethod
    @stockade.sandboxed()
    def called(cls, name: str) -> str:
        """What it is called, and who."""
        return f"{cls.__name__} {name}"
