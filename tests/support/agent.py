"""A program that behaves like a coding agent, to be run behind a policy: no model, but every habit.

It reads its settings and its key, asks its API what to do, edits the project,
runs git and the tests, keeps a session in its home; and then it tries what an
agent that was talked into it would try. It prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import socket
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
        "plant a hook": attempt(lambda: plant(Path(".git/hooks/pre-commit"))),
    }
    print(json.dumps(found))


def ask(address: list[object], key: str) -> str:
    try:
        with socket.create_connection((str(address[0]), int(str(address[1]))), 5) as connection:
            connection.sendall(f"{key}\n".encode())
            return connection.makefile().readline().strip()
    except OSError as error:
        return f"no answer: {error.strerror}"


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stdout.strip() or done.stderr.strip()}".strip()


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except (OSError, KeyError) as error:
        return type(error).__name__
    return "done"


def plant(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\ntouch /tmp/planted\n")
    path.chmod(0o755)


if __name__ == "__main__":
    main()
