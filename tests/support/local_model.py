"""A model on the loopback address, for agents that run outside; `support/model_apis.py` answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from support.internet_web import Request
from support.model_apis import messages

KEY = "sk-for-the-agent"


class LocalModel:
    """What the model was told, and where it is."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[dict[str, Any]] = []

    @property
    def results(self) -> list[str]:
        """What the tools answered, as the last request has it."""
        found = []
        for message in self.requests[-1]["messages"] if self.requests else ():
            blocks = message["content"] if isinstance(message["content"], list) else ()
            found += [block for block in blocks if block.get("type") == "tool_result"]
        return [json.dumps(block.get("content"), ensure_ascii=False) for block in found]


@contextlib.contextmanager
def local_model(**wanted: Any) -> Iterator[LocalModel]:
    """A model that wants a tool to be used: `command`, or `tool` and `arguments`."""
    model = LocalModel()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Request(
                "POST", self.path, "localhost", headers, body, False, "127.0.0.1", 80, "HTTP/1.1"
            )
            answer = messages(request, wanted.get("command", ""), KEY, **_others(wanted))
            if answer.status == 200:
                model.requests.append(json.loads(body))
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body if answer.stream is None else asyncio.run(_whole(answer.stream)))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        model.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield model
        server.shutdown()
        thread.join()


def _others(wanted: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wanted.items() if key != "command"}


async def _whole(stream: Any) -> bytes:
    return b"".join([piece async for piece in stream])
