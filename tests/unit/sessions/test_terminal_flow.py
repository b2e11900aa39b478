"""Copies between two terminals."""

from __future__ import annotations

import os
import threading

from stockade.runs.io.eventloop import Events
from stockade.sessions.attach.terminal_flow import Flow


def test_what_is_there_is_copied_and_a_source_that_blocks_is_not_waited_for() -> None:
    """After `su`, the user's terminal is a copy of stdin, which blocks."""
    source, typing = os.pipe()
    shown, sink = os.pipe()
    with open(source), open(typing, "wb", buffering=0) as keys, open(shown, "rb", buffering=0) as screen:
        flow = Flow(Events(), source, sink, lambda data: None)
        keys.write(b"typed before")
        copying = threading.Thread(target=flow.drain, args=(100,), daemon=True)
        copying.start()
        copying.join(10)
        blocked = copying.is_alive()
        keys.write(b"later")
        copying.join(10)
        os.close(sink)
        assert screen.read() == b"typed before" and not blocked
