"""What a new user runs into, each with the real program: the hint says whether the sandbox is the reason."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from support.installs import SYSTEM_PATH
from support.means import need
from support.screen import STOCKADE

PYTHON = "/usr/bin/python3"
GIT = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
UNTRUSTED = "import sys; sys.exit('ssl.SSLCertVerificationError: certificate verify failed')"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    need(os.access(PYTHON, os.X_OK), f"{PYTHON} is not installed")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    for name in [name for name in os.environ if "CERT" in name or "_CA" in name]:
        monkeypatch.delenv(name)
    return tmp_path / "home"


@pytest.fixture
def repository(home: Path, workspace: Path) -> Path:
    (workspace / "docs").mkdir()
    (workspace / "docs" / "page").write_text("one\n")
    subprocess.run(["git", "init", "-q", str(workspace)], check=True, timeout=60)
    subprocess.run([*GIT, "-C", str(workspace), "add", "-A"], check=True, timeout=60)
    subprocess.run([*GIT, "-C", str(workspace), "commit", "-qm", "one"], check=True, timeout=60)
    return workspace


def hint(workspace: Path, *command: str, **clauses: object) -> str:
    policy = Policy(workspace=str(workspace), **clauses)  # type: ignore[arg-type]
    result = stockade.run(command, policy, on_exit="discard", advise=True)
    assert result.outcome == "exited"
    assert result.exit_code != 0
    assert result.denials == ()  # a hint is no evidence
    return result.hint


def typed(directory: Path, *words: str) -> str:
    """What `stockade run` prints when a user types it in a directory."""
    done = subprocess.run(
        [STOCKADE, "run", *words], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr


def test_a_linked_worktree(repository: Path, tmp_path: Path) -> None:
    worktree = tmp_path / "worktree"
    subprocess.run(
        ["git", "-C", str(repository), "worktree", "add", "-q", str(worktree)], check=True, timeout=60
    )
    (worktree / "new").write_text("")
    assert "the repository of this worktree is read-only inside" in hint(worktree, "git", "add", "new")


def test_a_subdirectory_of_a_repository(repository: Path) -> None:
    assert f"`-w {repository}`" in hint(repository / "docs", "git", "status")


def test_a_directory_that_git_renames(repository: Path) -> None:
    assert "`mv OLD NEW && git add -A OLD NEW`" in hint(repository, "git", "mv", "docs", "pages")


def test_a_commit_without_an_identity(repository: Path) -> None:
    found = hint(repository, "git", "commit", "--allow-empty", "-m", "two")
    assert "`git config --global user.name NAME`" in found


def test_a_module_that_only_the_callers_pythonpath_leads_to(
    home: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "frobnicate.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(library))
    found = hint(workspace, PYTHON, "-c", "import frobnicate")
    assert f"`--pass-env PYTHONPATH --read {library}`" in found
    policy = Policy(workspace=str(workspace), pass_env=["PYTHONPATH"], read=[str(library)])
    assert stockade.run([PYTHON, "-c", "import frobnicate"], policy, on_exit="discard").ok


def test_a_certificate_bundle_that_no_known_variable_names(
    home: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "company.pem"
    bundle.write_text(CERTIFICATE)
    monkeypatch.setenv("COMPANY_CA_BUNDLE", str(bundle))
    found = hint(workspace, PYTHON, "-c", UNTRUSTED)
    assert f"`--pass-env COMPANY_CA_BUNDLE --read {bundle}` passes it" in found


def test_a_certificate_bundle_that_is_refused_because_of_a_private_key(
    home: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "both.pem"
    bundle.write_text(f"{CERTIFICATE}-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    found = hint(workspace, PYTHON, "-c", UNTRUSTED, net=["example.com"])
    assert "SSL_CERT_FILE is not passed" in found
    assert "--read" not in found


def test_the_task_limit(home: Path, workspace: Path) -> None:
    program = (
        "import threading, time\n"
        "for _ in range(64): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
    )
    found = hint(workspace, PYTHON, "-c", program, limits={"tasks": 16})
    assert "--limit tasks=" in found


def test_a_file_that_the_previous_run_made(home: Path, workspace: Path) -> None:
    typed(workspace, "--", "sh", "-c", "echo one > made")
    assert "made is not among your files, but workspace" in typed(workspace, "--", "cat", "made")


def test_an_error_that_a_wall_may_have_given_is_a_guess_that_says_so(home: Path, workspace: Path) -> None:
    found = hint(workspace, "sh", "-c", "echo x > /usr/made")
    assert "a guess from what the program printed" in found
    assert "`stockade explain -- sh -c 'echo x > /usr/made'`" in found
    assert hint(workspace, PYTHON, "-c", "raise SystemExit('no reason')") == ""


def test_datagrams_to_a_port_that_no_rule_has(home: Path, workspace: Path) -> None:
    send = "import socket as s; s.socket(type=s.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 5000)); 1/0"
    found = hint(workspace, PYTHON, "-c", send, net=["api.example.com:5000"])
    assert "sent datagrams once to a port that no rule for datagrams has: `--net udp://HOST:PORT`" in found
    look_up = "import socket; socket.getaddrinfo('api.example.com', 80); 1/0"
    assert hint(workspace, PYTHON, "-c", look_up, net=["api.example.com"]) == ""


def test_a_closed_socket_option_may_be_the_reason(home: Path, workspace: Path) -> None:
    cork = "import socket; socket.socket(type=socket.SOCK_DGRAM).setsockopt(17, 1, 1)"
    assert "a guess from what the program printed" in hint(workspace, PYTHON, "-c", cork)


def test_a_guess_repeats_no_word_of_the_program(home: Path, workspace: Path) -> None:
    (workspace / "job").write_text("echo 'Permission denied; run evil.sh' >&2; exit 1")
    found = hint(workspace, "sh", "job")
    assert found.endswith("`stockade explain -- sh job`, with the options of this run, shows what")
    assert "evil" not in found
