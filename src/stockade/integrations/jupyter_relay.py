"""The relay between a sandboxed Jupyter kernel and its clients, and what it lets a kernel show.

A kernel binds its sockets in a directory that it shares with the relay. Clients (the Jupyter server,
nbclient, a console) connect to the relay's own sockets, in a directory that the kernel does not see. The
relay is a thread of the process that started the kernel. It passes requests on as they are. Of what the
kernel sends, it passes only messages that frontends show as text, and in them only the display types that
the user allows: HTML, JavaScript and widgets run in the notebook page, with the user's rights on the Jupyter
server.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stockade.integrations import needs_extra

with needs_extra("jupyter"):
    import zmq

#: What a frontend shows without running anything of it.
PLAIN_TYPES = ("text/plain", "image/png", "image/jpeg", "image/gif")
#: The largest message that a kernel may send; libzmq hangs up on a larger one.
MOST_BYTES = 64 << 20

_DELIMITER = b"<IDS|MSG>"
#: Messages without anything that a frontend renders.
_TEXT = frozenset({
    "clear_output", "comm_info_reply", "complete_reply", "connect_reply", "error", "execute_input",
    "history_reply", "input_request", "interrupt_reply", "iopub_welcome", "is_complete_reply",
    "shutdown_reply", "status", "stream",
})  # fmt: skip
#: Messages whose content is a mime bundle.
_BUNDLES = frozenset({"display_data", "execute_result", "inspect_reply", "update_display_data"})

#: Makes the signature of the four parts of a message.
Sign = Callable[[list[bytes]], bytes]


def filtered(parts: list[bytes], allowed: Collection[str], sign: Sign) -> list[bytes] | None:
    """Return a kernel's message with only the `allowed` display types, signed anew; None if it must not pass.

    The header and the content are written anew, so that every reader finds in them what was checked here.
    """
    try:
        start = parts.index(_DELIMITER)
        _, header_bytes, parent, metadata, content_bytes = parts[start + 1 : start + 6]
        header, content = json.loads(header_bytes), json.loads(content_bytes)
        if not isinstance(header, dict) or not isinstance(content, dict):
            return None
        kind, id = header.get("msg_type"), header.get("msg_id")
        if not isinstance(kind, str) or not isinstance(id, str):
            return None
        shown = _shown(kind, content, allowed)
        if shown is None:
            return None
        signed = [json.dumps(header).encode(), parent, metadata, json.dumps(shown).encode()]
    except (ValueError, RecursionError):  # content can be too deep to be written, though it could be read
        return None
    # What follows the content are buffers, which only widgets have.
    return [*parts[: start + 1], sign(signed), *signed]


def _shown(kind: str, content: dict[str, Any], allowed: Collection[str]) -> dict[str, Any] | None:
    """Return what a frontend may get of the content of a message of this kind; None if nothing."""
    if kind in _TEXT:
        return content
    if kind in _BUNDLES:
        return _bundle(content, allowed)
    if kind == "kernel_info_reply":
        return content | {"help_links": [], "debugger": False}
    if kind == "execute_reply":
        named = content.get("user_expressions")
        pages = content.get("payload")
        return content | {
            "user_expressions": {
                name: _bundle(value, allowed)
                for name, value in (named if isinstance(named, dict) else {}).items()
                if isinstance(value, dict)
            },
            "payload": [
                _bundle(page, allowed)
                for page in (pages if isinstance(pages, list) else [])
                if isinstance(page, dict)
            ],
        }
    return None  # widgets (comm_…), the debugger, and what this version of Stockade does not know


def _bundle(content: dict[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """Return the content with only the allowed types in its data, and each of them as text."""
    kept = dict(content)
    for field, wanted in (("data", str), ("metadata", dict)):
        if field in kept:
            values = kept[field] if isinstance(kept[field], dict) else {}
            kept[field] = {
                name: value for name, value in values.items() if name in allowed and isinstance(value, wanted)
            }
    return kept


class KernelRelay:
    """Passes messages between the sockets of a kernel and those of its clients, in a thread.

    `front` and `back` are the beginnings of the sockets' paths, and `ports` their numbers by channel, as
    Jupyter writes them: the shell of a kernel is at `{back}-{ports["shell"]}`. With `allowed` None everything
    passes.
    """

    def __init__(
        self, front: str, back: str, ports: Mapping[str, int], allowed: Collection[str] | None, sign: Sign
    ) -> None:
        self._allowed, self._sign = allowed, sign
        self._context = zmq.Context()
        self._peers: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}
        self._kernel_side: set[zmq.Socket[bytes]] = set()
        # The kernel sends requests for input to the name of the socket that the request came from.
        name = secrets.token_hex(8).encode()
        try:
            for channel, port in ports.items():
                kinds = (zmq.XPUB, zmq.XSUB) if channel == "iopub" else (zmq.ROUTER, zmq.DEALER)
                near, far = (self._context.socket(kind) for kind in kinds)
                for one in (near, far):
                    one.setsockopt(zmq.LINGER, 0)
                far.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
                if channel == "iopub":
                    near.setsockopt(zmq.XPUB_VERBOSE, 1)  # each client gets the kernel's welcome
                else:
                    far.setsockopt(zmq.IDENTITY, name)
                near.bind(f"ipc://{front}-{port}")
                far.connect(f"ipc://{back}-{port}")
                self._peers |= {near: far, far: near}
                if channel != "hb":  # a heartbeat is an echo of what the client sent
                    self._kernel_side.add(far)
            self._end, self._told = (self._context.socket(zmq.PAIR) for _ in range(2))
            self._told.bind("inproc://end")
            self._end.connect("inproc://end")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._pass_on, name="stockade-kernel-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove the clients' sockets; harmless when repeated."""
        if self._thread.is_alive():
            self._end.send(b"")
            self._thread.join()

    def _pass_on(self) -> None:
        poller = zmq.Poller()
        for socket in (*self._peers, self._told):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._told in ready:
                self._end.close(linger=0)
                self._context.destroy(linger=0)
                return
            for socket in ready:
                parts: list[bytes] | None = socket.recv_multipart()
                if self._allowed is not None and socket in self._kernel_side:
                    parts = filtered(parts or [], self._allowed, self._sign)
                if parts:
                    # What has no receiver, or one that has stopped reading, is lost, as with a kernel's own.
                    with contextlib.suppress(zmq.ZMQError):
                        self._peers[socket].send_multipart(parts, zmq.NOBLOCK)
