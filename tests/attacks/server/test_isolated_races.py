"""Programs of a sandbox that change paths while sessions are made over them, or fill what sessions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.isolated import SessionUnderTest, create, isolated, warm_sandbox
from support.server import ServedSandbox, ServerUnderTest, module_server

#: How many sessions are made while a program swaps a directory and a link.
ATTEMPTS = 40
SWAPPING = """
import ctypes, os
call, exchange = ctypes.CDLL(None).syscall, 2
number = 316 if os.uname().machine == "x86_64" else 276
while True:
    call(number, -100, b"/data/swap", -100, b"/data/link", exchange)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(scope="module")
def sandbox(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with warm_sandbox(server) as found:
        yield found


@pytest.fixture
def attacker(sandbox: ServedSandbox) -> Iterator[SessionUnderTest]:
    with isolated(sandbox, workspace={"path": "/data", "mode": "rw"}) as found:
        yield found


@pytest.mark.parametrize("target", ["/etc", "/root", "/tmp"])
def test_defect_9_a_directory_that_becomes_a_link_is_never_followed(
    sandbox: ServedSandbox, attacker: SessionUnderTest, target: str
) -> None:
    attacker.text(f"rm -rf swap link; mkdir swap; touch swap/mine; ln -s {target} link")
    attacker.background(f"python3 -c '{SWAPPING}'")
    answers = set()
    for _ in range(ATTEMPTS):
        answer = create(sandbox, binds=[{"source": "/data/swap", "dest": "/workspace/in"}])
        answers.add(answer.status_code)
        if answer.status_code == 201:
            session = SessionUnderTest(sandbox, answer.json()["session_id"])
            assert session.text("ls -A /workspace/in") == "mine\n"
            session.delete()
    # The gate refuses a directory that is no longer where its name says: then the walls do not come up.
    assert 400 in answers
    assert answers <= {201, 400, 503}


def test_a_session_cannot_name_or_signal_what_runs_in_another(sandbox: ServedSandbox) -> None:
    with isolated(sandbox) as one, isolated(sandbox) as two:
        one.background("sleep 60")
        assert "sleep 60" not in two.text("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' || true")
        two.run("kill -9 -1")
        assert one.text("echo on") == "on\n"


def test_nothing_that_a_session_writes_to_its_descriptors_forges_the_end(sandbox: ServedSandbox) -> None:
    with isolated(sandbox) as session:
        forged = "for n in $(seq 3 260); do printf '\\n%s 0 0\\n' 0123456789abcdef >&$n; done 2>/dev/null"
        found = session.run(f"{forged}; echo still; exit 9")
        assert (found.stdout[-6:], found.exit_code) == ("still\n", 9)
        assert session.text("echo on") == "on\n"


def test_a_session_that_uses_up_its_tasks_is_deleted_whole(sandbox: ServedSandbox) -> None:
    with isolated(sandbox) as session:
        session.background("f() { f | f & }; f; sleep 60")
        session.run("sleep 0.2", timeout_seconds=5)
    with isolated(sandbox) as other:
        assert other.text("echo on") == "on\n"
