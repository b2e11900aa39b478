"""Servers that differ in what they take for the body of a request: `python -m support.body_servers ADDRESS`.

Each notes every request that it executes on stdout, as a line of JSON: the server, the request line, and
Authorization. Those written here are in `RAW`; beside them runs Python's own `http.server`, and uvicorn.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Note = Callable[[str, str, str], None]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n"


class RawServer(NamedTuple):
    """What a server that never reads a body does otherwise."""

    #: It answers each request twice.
    twice: bool = False
    #: It refuses `Expect`, and takes what follows for the next request.
    refuses_expect: bool = False
    #: It does not heed `Connection: close` either.
    deaf: bool = False

    def serve(self, connection: socket.socket, name: str, note: Note) -> None:
        """Serve a connection to its end; a body is the next request."""
        received = b""
        while data := connection.recv(65536):
            received += data
            while b"\r\n\r\n" in received:
                head, _, received = received.partition(b"\r\n\r\n")
                line, *fields = head.decode("latin-1").split("\r\n")
                values = {key.lower(): value for key, _, value in (field.partition(": ") for field in fields)}
                refused = self.refuses_expect and "expect" in values
                if not refused:
                    note(name, line, values.get("authorization", ""))
                answer = ANSWER.replace(b"200 OK", b"417 No") if refused else ANSWER
                connection.sendall(answer * (2 if self.twice else 1))
                if values.get("connection", "").lower() == "close" and not self.deaf:
                    return


RAW = {
    "early": RawServer(),
    "twice": RawServer(twice=True),
    "expect": RawServer(refuses_expect=True),
    "deaf": RawServer(deaf=True),
}
PORTS = {
    name: 8101 + number
    for number, name in enumerate((*RAW, "http.server", "uvicorn", "node", "nginx", "tls"))
}


def _note(name: str, line: str, authorization: str) -> None:
    # One write: several threads note.
    os.write(1, json.dumps([name, line, authorization]).encode() + b"\n")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        _note("http.server", self.requestline, self.headers.get("authorization", ""))
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"ok\n")

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing about clients that go away."""


async def application(scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """An application of uvicorn that answers without a look at the body."""
    if scope["type"] == "http":
        headers = dict(scope["headers"])
        _note("uvicorn", f"{scope['method']} {scope['path']}", headers.get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"ok\n"})


def _listen(address: str, name: str) -> None:
    listener = socket.create_server((address, PORTS[name]))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_raw, args=(connection, name), daemon=True).start()


def _serve_raw(connection: socket.socket, name: str) -> None:
    try:
        with connection:
            RAW[name].serve(connection, name, _note)
    except OSError:
        return


def main(address: str) -> None:
    """Serve all of them."""
    import uvicorn

    for name in RAW:
        threading.Thread(target=_listen, args=(address, name), daemon=True).start()
    server = _Server((address, PORTS["http.server"]), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uvicorn.run(application, host=address, port=PORTS["uvicorn"], log_level="error", lifespan="off")


#: Node's own server, which answers without a look at the body.
NODE = """
require("http").createServer((request, response) => {
  const said = request.headers.authorization || "";
  console.log(JSON.stringify(["node", request.method + " " + request.url, said]));
  response.setHeader("Content-Length", 3);
  response.end("ok\\n");
}).listen(+process.argv[2], process.argv[1]);
"""
#: nginx, which answers by itself, and below /v1/proxied from `http.server` over connections that it keeps.
NGINX = """
daemon off;
pid {place}/nginx.pid;
error_log {place}/nginx.err;
worker_processes 1;
events {{ worker_connections 64; }}
http {{
  log_format noted escape=json '["nginx","$request","$http_authorization"]';
  access_log {place}/nginx.log noted;
  client_body_temp_path {place}/b; proxy_temp_path {place}/p; fastcgi_temp_path {place}/f;
  uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
  upstream kept {{ server {address}:{behind}; keepalive 4; }}
  server {{
    listen {address}:{port};
    listen {address}:{tls} ssl http2;
    ssl_certificate {certificate}; ssl_certificate_key {key};
    location / {{ return 200 "ok\\n"; }}
    location /v1/proxied {{ proxy_pass http://kept; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""

if __name__ == "__main__":
    main(sys.argv[1])
