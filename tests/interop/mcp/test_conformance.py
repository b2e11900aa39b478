"""The conformance suite of the protocol's authors, against the HTTP server with its checks.

It cannot send a token, so the test adds it to each request; Host and Origin are those that the suite sends.
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from stockade.integrations.mcp.serving import http_app
from support.mcp_client import workbench
from support.means import need

#: Where .ci/run puts the suite, with the Node that it needs.
PLACE = Path("/usr/local/lib/mcp-conformance/node_modules/.bin")
TOKEN = "a-token-for-the-conformance-suite"

#: Scenarios about tools, prompts and resources that the suite's own example server has.
FIXTURES = {
    "tools-call-image", "tools-call-audio", "tools-call-embedded-resource", "tools-call-mixed-content",
    "tools-call-with-logging", "tools-call-with-progress", "tools-call-sampling", "tools-call-elicitation",
    "elicitation-sep1034-defaults", "elicitation-sep1330-enums", "resources-read-text",
    "resources-read-binary", "resources-templates-read", "prompts-get-simple", "prompts-get-with-args",
    "prompts-get-embedded-resource", "prompts-get-with-image",
}  # fmt: skip
#: Scenarios about abilities that the server does not have and does not announce.
ABILITIES = {"logging-set-level", "completion-complete", "resources-subscribe", "resources-unsubscribe"}


@contextmanager
def served(tree: Path) -> Iterator[str]:
    """The server's address, with the token on every request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = http_app(workbench(tree), TOKEN, "127.0.0.1", port)

        async def with_token(scope, receive, send):  # type: ignore[no-untyped-def]
            if scope["type"] == "http":
                added = (b"authorization", f"Bearer {TOKEN}".encode())
                scope = {**scope, "headers": [*scope["headers"], added]}
            await app(scope, receive, send)

        config = uvicorn.Config(with_token, log_level="critical", loop="asyncio", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.should_exit = True
            thread.join()


def test_the_server_conforms_but_for_what_it_does_not_offer(tmp_path: Path) -> None:
    need((PLACE / "conformance").exists(), "the MCP conformance suite is not installed: see .ci/run")
    with served(tmp_path) as address:
        done = subprocess.run(
            [PLACE / "node", PLACE / "conformance", "server", "--url", address],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    summary = re.findall(r"^([✓✗]) (\S+): ", done.stdout, re.MULTILINE)
    found = {name: mark == "✓" for mark, name in summary}
    failed = {name for name, passed in found.items() if not passed}
    assert failed == FIXTURES | ABILITIES, done.stdout[-3000:]
    assert {name for name, passed in found.items() if passed} >= {
        "server-initialize", "ping", "tools-list", "tools-call-error", "dns-rebinding-protection",
        "server-sse-multiple-streams", "resources-list", "prompts-list",
    }  # fmt: skip
