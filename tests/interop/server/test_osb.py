"""The published command line `osb`, unmodified."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from opensandbox_cli.main import cli

Osb = Callable[..., str]


@pytest.fixture(scope="module")
def osb(address: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Osb:
    domain, key = address
    home = tmp_path_factory.mktemp("osb")
    environment = {"OPEN_SANDBOX_DOMAIN": domain, "OPEN_SANDBOX_API_KEY": key, "HOME": str(home)}
    # In this process: a new Python loads the SDK for a second, twenty times.
    runner = CliRunner(env=environment)

    def run(*words: str, code: int = 0) -> str:
        done = runner.invoke(cli, words)
        assert done.exit_code == code, (done.output, done.exception)
        return done.stdout

    return run


@pytest.fixture(scope="module")
def made(osb: Osb) -> Iterator[str]:
    """A sandbox that the command line makes, and kills in the end."""
    told = json.loads(
        osb("sandbox", "create", "--image", "host", "--timeout", "10m", "-m", "by=osb", "-o", "json")
    )
    yield told["id"]
    osb("sandbox", "kill", told["id"])


def test_a_sandbox_is_shown_and_listed(osb: Osb, made: str) -> None:
    assert json.loads(osb("sandbox", "get", made, "-o", "json"))["id"] == made
    assert made in osb("sandbox", "list", "-m", "by=osb", "-o", "json")
    assert "44772" in osb("sandbox", "endpoint", made, "--port", "44772", "-o", "json")
    osb("sandbox", "health", made)
    osb("sandbox", "renew", made, "--timeout", "20m")


def test_a_command_prints_and_a_failure_is_one(osb: Osb, made: str) -> None:
    assert osb("command", "run", made, "-o", "raw", "--", "echo", "hello").strip() == "hello"
    osb("command", "run", made, "-o", "raw", "--", "sh", "-c", "exit 3", code=1)


def test_files(osb: Osb, made: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)))
    osb("file", "upload", made, str(source), "/tmp/up")
    osb("file", "download", made, "/tmp/up", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    osb("file", "write", made, "/tmp/text", "--content", "some text", "--mode", "0640")
    assert osb("file", "cat", made, "/tmp/text").strip() == "some text"
    osb("file", "replace", made, "/tmp/text", "--old", "some", "--new", "more")
    assert "/tmp/text" in osb("file", "search", made, "/tmp", "--pattern", "te*t", "-o", "json")
    osb("file", "rm", made, "/tmp/text")


def test_sessions_and_egress(osb: Osb, made: str) -> None:
    told = json.loads(osb("command", "session", "create", made, "--workdir", "/tmp", "-o", "json"))
    session = next(value for name, value in told.items() if "session" in name)
    assert osb("command", "session", "run", made, session, "-o", "raw", "--", "pwd").strip() == "/tmp"
    osb("command", "session", "delete", made, session)
    assert "deny" in osb("egress", "get", made, "-o", "json")


def test_pause_and_resume(osb: Osb, made: str) -> None:
    osb("sandbox", "pause", made)
    assert "Paused" in osb("sandbox", "get", made, "-o", "json")
    osb("sandbox", "resume", made)
