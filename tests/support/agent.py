"""A program that behaves like a coding agent, to be run behind a policy: no model, but every habit.

It reads its settings and its key, asks its API what to do, edits the project,
runs git and the tests, keeps a session in its home; and then it tries what an
agent that was talked into it would try. It prints what it found as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    wanted = json.loads(sys.argv[1])
    home = Path.home()
    settings = home / wanted["settings"]
    found: dict[str, object] = {
        "settings": settings.read_text(),
        "key": os.environ.get(wanted["key"]),
        "task": ask(wanted["api"], os.environ.get(wanted["key"], "")),
    }
    Path("adding.py").write_text("def add(a, b):\n    return a + b\n")
    found["tests"] = call(sys.executable, "-B", "-m", "unittest", "-q")
    found["commit"] = call("git", "commit", "-qam", "Adding adds")
    found["author"] = call("git", "log", "-1", "--format=%an")
    session = settings.parent / "session.jsonl"
    found["session"] = attempt(lambda: session.write_text("{}"))
    found["attempts"] = {
        "change its settings": attempt(lambda: settings.write_text("run this outside")),
        "read a private key": attempt((home / ".ssh/id_ed25519").read_text),
        "read the project's secrets": attempt(Path(".env").read_text),
        "read secrets deeper in the project": attempt(Path("app/.env").read_text),
        "read another project": attempt((home / "other/secret.txt").read_text),
        "read a token in the environment": attempt(lambda: os.environ["GITHUB_TOKEN"]),
        "leave something in the home": attempt(lambda: (home / ".bashrc").write_text("run this outside")),
        "reach another host": attempt(lambda: reach("evil.example", 443)),
        "reach another address": attempt(lambda: reach("11.0.0.66", 443)),
        "reach a server of this machine": attempt(lambda: reach("127.0.0.1", 80)),
        "reach the metadata address": attempt(lambda: reach("169.254.169.254", 80)),
        "plant a hook": attempt(lambda: plant(Path(".git/hooks/pre-commit"))),
    }
    print(json.dumps(found))


def ask(host: str, key: str) -> str:
    # Each API has its own header; the others mean nothing to it.
    headers = {"X-Api-Key": key, "X-Goog-Api-Key": key, "Authorization": f"Bearer {key}"}
    connection = http.client.HTTPSConnection(host, timeout=5)
    try:
        connection.request("POST", "/task", headers=headers)
        return connection.getresponse().read().decode().strip()
    except OSError as error:
        return f"no answer: {error.strerror}"
    finally:
        connection.close()


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stdout.strip() or done.stderr.strip()}".strip()


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except (OSError, KeyError) as error:
        return type(error).__name__
    return "done"


def reach(host: str, port: int) -> None:
    """Connect and ask; a connection that is closed without an answer reached nothing."""
    with socket.create_connection((host, port), 5) as connection:
        if port == 443:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.wrap_socket(connection, server_hostname=host).close()
            return
        connection.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        if not connection.recv(100):
            raise ConnectionResetError


def plant(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\ntouch /tmp/planted\n")
    path.chmod(0o755)


if __name__ == "__main__":
    main()
