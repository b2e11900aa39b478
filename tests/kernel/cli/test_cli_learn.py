"""`stockade learn` as its users type it: files that it writes and keeps, and what it says."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.cli import stockade_command

Call = Callable[..., CompletedProcess[str]]


@pytest.fixture
def call(workspace: Path, tmp_path: Path) -> Call:
    """The command line in a workspace, with a home that has a secret in it."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("SECRET")
    (tmp_path / "data").mkdir()
    for name in ("one", "two"):
        (tmp_path / "data" / name).write_text(f"{name}\n")

    def run(*words: str, **env: str) -> CompletedProcess[str]:
        return stockade_command(*words, cwd=workspace, env={"HOME": str(home), **env})

    return run


def grants(paths: object) -> list[str]:
    """The granted paths but those of /etc, which depend on the system."""
    assert isinstance(paths, list)
    return [path for path in paths if not path.startswith("/etc/")]


def table(path: Path) -> dict[str, object]:
    return tomllib.loads(path.read_text())


def test_files_that_a_command_needs_one_after_the_other_are_learned(call: Call, tmp_path: Path) -> None:
    policy, data = tmp_path / "policy.toml", tmp_path / "data"
    command = ("sh", "-ec", f"cat {data}/one; cat {data}/two; echo done > made")
    done = call("learn", "-o", str(policy), "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one\ntwo\n") and f"wrote {policy}: " in done.stdout
    assert "learn only from commands that you trust" in done.stderr
    assert grants(table(policy)["read"]) == [f"{data}/one", f"{data}/two"]
    assert not (tmp_path / "workspace" / "made").exists(), "nothing that the command did is real"
    ran = call("run", "--json", "--discard", "-p", str(policy), "--", *command)
    assert json.loads(ran.stdout)["stdout"] == "one\ntwo\n"


def test_a_secret_is_a_question_and_the_command_never_sees_it(call: Call, tmp_path: Path) -> None:
    policy, home = tmp_path / "policy.toml", tmp_path / "home"
    done = call("learn", "-o", str(policy), "--", "cat", f"{home}/.ssh/id_rsa")
    assert done.returncode == 1 and "SECRET" not in done.stdout
    assert f"question: read {home}/.ssh/id_rsa" in done.stderr
    assert grants(table(policy).get("read", [])) == []
    assert '; to allow it: read = ["~/.ssh/id_rsa"]' in policy.read_text()


def test_a_secret_of_the_project_is_hidden_too(call: Call, tmp_path: Path, workspace: Path) -> None:
    (workspace / "sub").mkdir()
    (workspace / "sub" / ".env").write_text("SECRET")
    done = call("learn", "--json", "--", "sh", "-c", "cat sub/.env; true")
    found = json.loads(done.stdout)
    assert "**/.env?" in found["policy"]["deny"]
    assert [one["wanted"] for one in found["questions"]] == [f"read {workspace}/sub/.env"]


def test_a_file_that_exists_is_neither_replaced_nor_run_for(call: Call, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("# mine\n")
    done = call("learn", "-o", str(policy), "--", "true")
    assert done.returncode == 125 and "--merge adds to it, --force replaces it" in done.stderr
    assert policy.read_text() == "# mine\n" and "run 1" not in done.stderr
    assert call("learn", "-o", str(policy), "--force", "--", "true").returncode == 0
    assert policy.read_text().startswith("# What this command needs")


def test_a_link_is_not_written_through(call: Call, tmp_path: Path, workspace: Path) -> None:
    victim = tmp_path / "home" / ".bashrc"
    victim.write_text("mine\n")
    (workspace / "policy.toml").symlink_to(victim)
    for option in ("--force", "--merge"):
        done = call("learn", "-o", "policy.toml", option, "--", "true")
        assert done.returncode == 125 and "link" in done.stderr, done.stderr
    assert victim.read_text() == "mine\n"


def test_merging_keeps_comments_shows_the_difference_and_starts_there(call: Call, tmp_path: Path) -> None:
    policy, data = tmp_path / "policy.toml", tmp_path / "data"
    text = f'# Mine.\nread = [\n    "{data}/one",  # the first\n]\n\n[limits]\nwall = "1m"  # enough\n'
    policy.write_text(text)
    done = call("learn", "-o", str(policy), "--merge", "--", "cat", f"{data}/one", f"{data}/two")
    assert done.returncode == 0, done.stderr
    added = [line for line in done.stdout.splitlines() if line.startswith("+ ") and "/etc/" not in line]
    assert len(added) == 1 and f'"{data}/two"' in added[0]
    for line in text.splitlines():
        assert line in policy.read_text().splitlines()
    again = call("learn", "-o", str(policy), "--merge", "--", "cat", f"{data}/one", f"{data}/two")
    assert f"nothing to add to {policy}" in again.stdout


def test_the_policy_is_printed_without_a_file(call: Call) -> None:
    done = call("learn", "--", "echo", "hello")
    assert done.returncode == 0 and "exec" in tomllib.loads(done.stdout)
    assert "hello\n" in done.stderr


def test_json_has_the_policy_its_text_and_the_questions(call: Call, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = call("learn", "--json", "--", "sh", "-c", f"cat {tmp_path}/data/one {home}/.ssh/id_rsa; true")
    found = json.loads(done.stdout)
    assert grants(found["policy"]["read"]) == [f"{tmp_path}/data/one"] and found["settled"] is True
    assert [one["allow"] for one in found["questions"]] == ['read = ["~/.ssh/id_rsa"]']
    assert tomllib.loads(found["text"])["read"] == found["policy"]["read"]
    assert {one["reason"] for one in found["added"]["read"]} == {"cat"}


def test_a_command_that_fails_by_itself_keeps_its_exit_code(call: Call, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    done = call("learn", "-o", str(policy), "--", "sh", "-c", "exit 7")
    assert done.returncode == 7 and "The last run failed" in policy.read_text()
    assert f"next: stockade explain -p {policy} -- sh -c 'exit 7'" in done.stderr


def test_a_hint_about_the_last_run_is_printed(call: Call, tmp_path: Path) -> None:
    done = call("learn", "--", "ls", f"{tmp_path}/data")
    assert f"hint: {tmp_path}/data exists on the host, but the policy does not show it" in done.stderr


def test_a_command_that_does_not_exist_is_refused_and_nothing_is_written(call: Call, tmp_path: Path) -> None:
    done = call("learn", "-o", str(tmp_path / "policy.toml"), "--", "no-such-command")
    assert done.returncode == 125 and not (tmp_path / "policy.toml").exists()


def test_a_policy_of_the_project_needs_trust_and_learn_says_so(
    call: Call, tmp_path: Path, workspace: Path
) -> None:
    command = ("cat", f"{tmp_path}/data/one")
    done = call("learn", "-o", "stockade.toml", "--", *command)
    assert done.returncode == 0 and "stockade trust stockade.toml" in done.stderr
    assert table(workspace / "stockade.toml")["workspace"] == {"path": "."}
    refused = call("run", "--discard", "--", *command)
    assert refused.returncode == 125 and "trust" in refused.stderr
    assert call("trust", "--yes").returncode == 0
    assert call("run", "-q", "--discard", "--", *command).stdout == "one\n"


def test_a_command_of_the_users_path_that_is_missing_inside_is_learned(
    call: Call, tmp_path: Path, workspace: Path
) -> None:
    tool = tmp_path / "tools" / "mytool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho from the tool\n")
    tool.chmod(0o755)
    policy = tmp_path / "policy.toml"
    path = f"{tool.parent}:{os.environ['PATH']}"
    done = call("learn", "-o", str(policy), "--", "sh", "-c", "mytool", PATH=path)
    assert done.returncode == 0, done.stderr
    assert table(policy)["toolchain"] == ["mytool"]
    ran = call("run", "-q", "--discard", "-p", str(policy), "--", "sh", "-c", "mytool", PATH=path)
    assert ran.stdout == "from the tool\n"


def test_a_directory_that_the_command_makes_in_its_home_is_no_question(call: Call, tmp_path: Path) -> None:
    (tmp_path / "home" / "made" / "deep").mkdir(parents=True)
    done = call(
        "learn", "--json", "--", "sh", "-c", "mkdir ~/made/deep; mkdir -p ~/made/deep && touch ~/made/deep/x"
    )
    assert json.loads(done.stdout)["questions"] == []


def test_writing_elsewhere_is_a_question_with_the_danger(call: Call, tmp_path: Path) -> None:
    done = call("learn", "--json", "--", "sh", "-c", f"echo x > {tmp_path}/data/new; true")
    (question,) = json.loads(done.stdout)["questions"]
    assert question["allow"] == f'write = ["{tmp_path}/data"]' and "real" in question["why"]
    assert not (tmp_path / "data" / "new").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--merge", "--", "true"), "-o policy.toml"),
        (("-o", "pyproject.toml", "--", "true"), "file of its own"),
        (("-o", "no/such/policy.toml", "--", "true"), "another file"),
        (("-o", "p.toml"), "after --"),
        (("-w", "@", "--", "true"), "-w DIR"),
    ],
)
def test_mistakes_get_a_hint(call: Call, words: tuple[str, ...], hint: str) -> None:
    done = call("learn", *words)
    assert done.returncode == 125 and hint in done.stderr


@pytest.mark.parametrize("option", ["--force", "--merge"])
def test_only_a_regular_file_is_replaced(call: Call, tmp_path: Path, option: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        done = call("learn", "-o", str(place), option, "--", "touch", str(tmp_path / "data/ran"))
        assert done.returncode == 125 and f"{place} is not a regular file" in done.stderr
    assert pipe.is_fifo() and not (tmp_path / "data/ran").exists()
