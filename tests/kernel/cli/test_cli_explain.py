"""`stockade explain` answers from the policy that `stockade run` would use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.screen import STOCKADE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def explain(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STOCKADE, "explain", *words], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )


def answers(directory: Path, *words: str) -> list[dict[str, Any]]:
    done = explain(directory, "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["answers"]
    assert done.returncode == (0 if all(one["allowed"] for one in found) else 1)
    return found


def test_a_path_a_host_and_a_call_in_one_command(home: Path, workspace: Path) -> None:
    (workspace / "file").write_text("")
    words = ["./file", "~/.ssh", "example.com:443", "ptrace", "--net", "example.com"]
    found = answers(workspace, *words)
    kinds = [(one["access"]["action"], one["access"]["target"], one["allowed"]) for one in found]
    assert kinds == [
        ("read", str(workspace / "file"), True),
        ("write", str(workspace / "file"), True),
        ("read", str(home / ".ssh"), False),
        ("write", str(home / ".ssh"), True),
        ("connect", "example.com:443", True),
        ("call", "ptrace", False),
    ]
    assert found[2]["change"]["flag"] == f"--read '{home}/.ssh?'"
    assert "secrets" in found[2]["change"]["danger"]
    assert found[-1]["change"] is None


def test_words_say_what_they_are_or_are_forced(home: Path, workspace: Path) -> None:
    for name in ("ptrace", "example.com"):
        (workspace / name).write_text("")
    targets = {
        "ptrace": "ptrace",  # a call, although there is such a file
        "./ptrace": str(workspace / "ptrace"),
        "example.com": str(workspace / "example.com"),  # it exists here
        "example.org": "example.org",
        "localhost": "localhost",
        "10.0.0.1": "10.0.0.1",
        "[::1]:80": "[::1]:80",
        "https://example.org/page": "example.org:443",
        "unix:/run/docker.sock": "unix:/run/docker.sock",
    }
    found = answers(workspace, "--to", "read", *targets)
    assert [one["access"]["target"] for one in found] == list(targets.values())
    forced = answers(workspace, "--to", "read", "--host", "ptrace", "--path", "socket", "--call", "read")
    assert [one["access"]["action"] for one in forced] == ["read", "connect", "call"]


def test_a_word_that_is_nothing_gets_a_suggestion(home: Path, workspace: Path) -> None:
    done = explain(workspace, "ptrce")
    assert done.returncode == 125
    assert "did you mean the system call ptrace?" in done.stderr
    assert "./ptrce for a path, ptrce:443 for a host" in done.stderr
    assert explain(workspace, "--call", "no_such_call_at_all").returncode == 125
    assert "nothing to explain" in explain(workspace).stderr
    assert "the port is not a number from 1 to 65535" in explain(workspace, "udp://h:p").stderr


def test_the_policy_and_the_line_are_those_of_a_run(home: Path, workspace: Path) -> None:
    (workspace / "secret").write_text("")
    (workspace / "stockade.toml").write_text('deny = [\n    "other",\n    "secret",\n]\n')
    (found,) = answers(workspace, "--to", "read", "secret")
    clause = f'deny = "{workspace}/secret"'
    assert (found["allowed"], found["wall"], found["clause"]) == (False, "deny", clause)
    assert found["place"] == f"{workspace}/stockade.toml:3"
    assert found["change"]["remove"] == clause
    (other,) = answers(workspace, "-p", "stockade.toml", "--mode", "ro", "--to", "write", "stockade.toml")
    assert other["change"]["flag"] == "--mode overlay"


def test_the_words_for_people_name_the_wall_and_the_change(home: Path, workspace: Path) -> None:
    done = explain(workspace, "/var/lib", "seccomp", "api.example.com")
    assert done.returncode == 1
    for words in (
        "read: no, the policy does not show /var/lib",
        'to allow it: --read /var/lib (read = ["/var/lib"])',
        "no `net` of the policy allows it (control: network.none)",
        "dangerous: each further call is more of the kernel",
    ):
        assert words in done.stdout
    assert not os.listdir(workspace)


def test_a_hostile_name_does_not_reach_the_terminal(home: Path, workspace: Path) -> None:
    done = explain(workspace, "/tmp/\x1b[31mred\nread: yes")
    assert "\x1b" not in done.stdout
    assert "\nread: yes" not in done.stdout


@pytest.mark.parametrize("name", ["python3", ""])
def test_the_install_of_a_command_is_shown_if_it_is_named(home: Path, workspace: Path, name: str) -> None:
    tool = home / "tools/bin/tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    words = ["--command", str(tool)] if name else []
    (found,) = answers(workspace, "--to", "read", str(tool), *words)
    assert found["allowed"] is bool(name)


def test_a_change_beyond_the_ceiling_is_not_named(home: Path, workspace: Path) -> None:
    data = home / "data"
    data.mkdir()
    (free,) = answers(workspace, "--to", "read", str(data))
    assert free["change"]["flag"] == f"--read {data}"
    config = home / ".config/stockade"
    config.mkdir(parents=True)
    (config / "policies.toml").write_text(f'[ceiling]\nworkspace = "{workspace}"\n\n[agent.linter]\n')
    (bound,) = answers(workspace, "--agent", "linter", "--to", "read", str(data))
    assert bound["change"] is None
    assert "would be refused" in bound["reason"]
