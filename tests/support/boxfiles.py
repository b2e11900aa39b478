"""The files of a living sandbox, asked of its gate as the library does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stockade import Sandbox
from stockade.gate import client
from stockade.workspace.files import Files


@contextlib.contextmanager
def files_of(box: Sandbox) -> Iterator[Files]:
    """Its files, which outlive it until the statement ends."""
    opened, prepared = box._opened()
    opened.connection.ask_for_roots()
    reply = opened.connection.receive()
    assert reply is not None and reply.kind == client.ROOTS and reply.descriptors
    files = Files.from_descriptors(reply.descriptors, prepared.resolved, prepared.home)
    try:
        yield files
    finally:
        files.close()
