"""Those who attach to a kept sandbox without a terminal, and say what no client of ours would."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import AttachAcceptance, AttachSocket, FromHolder, Hello
from support.screens import PATIENCE

#: Wants the terminal that was used last.
HELLO = Hello(protocol.VERSION, 0, 24, 80, b"", {})
#: A connection and a pair of streams, of which the second is handed over.
Connected = tuple[AttachSocket, int, int]


def connected(home: Path) -> Connected:
    """The way to the holder of the only sandbox."""
    (place,) = (home / "run").glob("*/*.attach")
    directory = os.open(place.parent, os.O_PATH)
    try:
        line = protocol.connected(directory, place.name)
    finally:
        os.close(directory)
    assert line is not None
    return line, *protocol.streams()


def asked(one: Connected, hello: Hello) -> object:
    """What the holder says to it."""
    one[0].send(hello, one[2])
    return one[0].receive(FromHolder)[0]


def closed(one: Connected) -> None:
    one[0].close()
    os.close(one[1])
    os.close(one[2])


@contextlib.contextmanager
def client(home: Path) -> Iterator[tuple[AttachSocket, int]]:
    """A client without a terminal, which takes only what is read here."""
    one = connected(home)
    try:
        assert isinstance(asked(one, HELLO), AttachAcceptance)
        yield one[:2]
    finally:
        closed(one)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def heard(stream: int, last: bytes) -> bytes:
    """What is shown until something is."""
    found = bytearray()
    while found.rfind(last, max(0, len(found) - (1 << 17))) < 0:
        assert select.select([stream], [], [], PATIENCE)[0], f"waited in vain for {last!r}: {found[-200:]!r}"
        found += os.read(stream, 1 << 16)
    return bytes(found)
