"""Host programs in odd states: whatever they are in, a sandbox is as it should be or is refused in words."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from stockade.gate import client


@pytest.fixture(autouse=True)
def new_gate() -> Iterator[None]:
    """The gate takes the state of the program that starts it, so each test starts one."""
    client.shutdown()
    yield
    client.shutdown()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
def test_its_umask_is_the_programs_and_does_not_change_the_world(mask: int) -> None:
    old = os.umask(mask)
    try:
        result = stockade.run(["sh", "-c", "umask; stat -c %a / /etc /etc/passwd /tmp ~"])
    finally:
        os.umask(old)
    assert result.text.split() == [f"{mask:04o}", "755", "755", "444", "1777", "700"]


def test_signals_that_it_ignores_are_not_ignored_inside() -> None:
    numbers = (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGUSR1)
    old = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        status = stockade.run(["cat", "/proc/self/status"]).check().text
        waited = stockade.run(["sh", "-c", "(exit 3) & wait $!; echo $?"]).check().text
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert int(status.partition("SigIgn:\t")[2].split()[0], 16) & (1 << 31) - 1 == 0
    assert waited == "3\n"


def test_signals_that_it_blocks_are_not_blocked_inside() -> None:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1})
    try:
        status = stockade.run(["cat", "/proc/self/status"]).check().text
        ended = stockade.run(["sh", "-c", "sleep 60"], timeout=0.2, grace=30)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert status.partition("SigBlk:\t")[2].split()[0] == "0" * 16
    assert ended.outcome == "timed-out" and ended.usage.wall < 20, "TERM was not enough"


def test_without_streams_of_its_own_it_can_run_sandboxes(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "import stockade\n"
        "for stream in (0, 1, 2): os.close(stream)\n"
        "result = stockade.run(['sh', '-c', 'cat; echo out; echo err >&2'], input=b'in ')\n"
        "with open(sys.argv[1], 'wb') as file: file.write(result.stdout + result.stderr)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], timeout=60, check=False)
    assert (tmp_path / "out").read_bytes() == b"in out\nerr\n"


def test_when_its_directory_is_gone_it_can_run_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert stockade.run(["echo", "fine"]).text == "fine\n"
    with pytest.raises(stockade.PolicyError, match="was removed"):
        stockade.run(["true"], Policy(workspace="."))


@pytest.mark.parametrize("limit", [10, 14, 18, 22, 26])
def test_when_it_can_open_hardly_a_file_the_run_is_refused_in_words_or_works(limit: int) -> None:
    stockade.run(["true"]).check()
    client.shutdown()
    used = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + limit, hard))
    try:
        assert stockade.run(["true"]).ok
    except stockade.StockadeError as error:
        assert "defect" not in error.hint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestHome:
    def inside(self) -> list[str]:
        return (
            stockade.run(["sh", "-c", 'echo "$HOME"; pwd; echo x > ~/x && cat ~/x']).check().text.splitlines()
        )

    @pytest.mark.parametrize(
        "home",
        ["/home/nobody-there", "/nonexistent", "/var/tmp/home", "/tmp/home", "/run/user/0", "/a b", "/opt"],
    )
    def test_it_is_private_at_the_callers_own_path(self, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", home)
        assert self.inside() == [home, home, "x"]
        assert not os.path.exists(f"{home}/x")

    @pytest.mark.parametrize("home", ["/", "/etc", "/usr/x", "/proc/x", "/sys/x", "/dev/shm/x"])
    def test_where_none_can_be_it_is_the_private_tmp(
        self, home: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", home)
        assert self.inside() == ["/tmp", "/tmp", "x"]

    def test_in_var_it_leaves_room_for_tmp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/var")
        assert self.inside()[2] == "x"

    @pytest.mark.parametrize("home", ["", "relative"])
    def test_without_a_usable_one_the_user_data_base_says_where(
        self, home: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import pwd

        monkeypatch.setenv("HOME", home)
        assert self.inside()[0] == pwd.getpwuid(os.geteuid()).pw_dir
