"""The register of living sandboxes: entering, looking, ending."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stockade import state
from stockade.errors import NotFoundError, SetupError
from stockade.runs.register import register, sandbox_record
from stockade.runs.register.record_file import FILE
from stockade.runs.register.sandbox_record import SandboxRecord
from support.supervisors import ID, dead, directories, line, stand_in, supervisor

OTHER = "0123ffffffff"


@pytest.fixture
def home(stockade_home: Path) -> str:
    return str(stockade_home)


class TestEntering:
    def test_a_sandbox_is_listed_while_it_is_entered(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID, command=("make", "all"), workspace="/srv"))
        (record,) = register.living(home)
        assert (record.id, record.command, record.workspace) == (ID, ("make", "all"), "/srv")
        assert record.supervisor == os.getpid() and record.supervisor_born == sandbox_record.born(os.getpid())
        assert time.strptime(record.started, "%Y-%m-%dT%H:%M:%SZ")
        entry.close()
        entry.close()
        assert register.living(home) == []

    def test_an_update_is_seen_and_finds_out_when_the_gate_was_born(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        with stand_in() as gate:
            entry.update(gate=gate.pid, groups=("/sys/fs/cgroup/x",))
            (record,) = register.living(home)
            assert record == entry.record
            assert record.gate_born == sandbox_record.born(gate.pid) > 0
        assert register.living(home) == []  # its gate is gone
        entry.close()

    def test_one_without_anything_to_clean_up_is_written_with_its_first_update(self, home: str) -> None:
        never = register.enter(home, SandboxRecord(id=OTHER), later=True)
        entry = register.enter(home, SandboxRecord(id=ID), later=True)
        assert register.living(home) == [] and not entry.was_killed()
        entry.update(name="x")
        assert [(record.id, record.name) for record in register.living(home)] == [(ID, "x")]
        entry.close()
        never.close()
        assert register.living(home) == []

    def test_without_room_for_its_record_it_is_only_missed(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID), later=True)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            entry.update(name="x")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert register.living(home) == []
        entry.close()

    def test_nobody_else_can_read_it(self, home: str) -> None:
        old = os.umask(0)
        try:
            entry = register.enter(home, SandboxRecord(id=ID, command=("login", "--password=x")))
        finally:
            os.umask(old)
        (directory,) = directories(home)
        for path in (directory.parent, directory):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in directory.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        entry.close()

    def test_a_long_command_is_cut_and_odd_bytes_are_no_failure(self, home: str) -> None:
        words = ("sh", "-c", os.fsdecode(b"\xff\xfe"), "x" * 100_000, "never seen")
        entry = register.enter(home, SandboxRecord(id=ID, command=words, workspace="/\udcff"))
        (record,) = register.living(home)
        assert record.command[:3] == ("sh", "-c", "\ufffd\ufffd")
        assert len(record.command) == 4 and len(record.command[3]) < 5000 and record.command[3][-1] == "…"
        entry.update(layer="ab")
        assert entry.record.command == record.command
        entry.close()

    def test_the_directory_serves_the_next_sandbox_and_goes_with_the_process(self, home: str) -> None:
        register.enter(home, SandboxRecord(id=ID)).close()
        first = directories(home)
        register.enter(home, SandboxRecord(id=OTHER)).close()
        assert directories(home) == first
        register.shutdown()
        assert directories(home) == []
        with supervisor(Path(home), then="entry.close()", id=ID) as process:
            process.wait()
        assert directories(home) == []

    def test_sandboxes_of_many_threads_do_not_meet(self, home: str) -> None:
        def one(number: int) -> bool:
            id = f"{number:012x}"
            entry = register.enter(home, SandboxRecord(id=id))
            entry.update(layer=id)
            seen = any(record.layer == id for record in register.living(home))
            if number % 7 == 0:
                register.shutdown()
                register.sweep(home)
            entry.close()
            return seen

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(200)))
        assert register.living(home) == []

    def test_the_lock_survives_a_look_and_a_sweep_of_ones_own(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        register.living(home)
        register.sweep(home)
        fd = os.open(directories(home)[0], os.O_RDONLY)
        # The supervisor is alive and would veto a sweep all the same, so the lock itself is looked at.
        held = "import sys; from stockade.runs.register import sandbox_record as record; "
        held += "print(record.is_locked(int(sys.argv[1])))"
        done = subprocess.run(
            [sys.executable, "-c", held, str(fd)], capture_output=True, text=True, pass_fds=[fd], check=True
        )
        os.close(fd)
        assert done.stdout == "True\n"
        entry.close()

    @pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
    def test_a_state_directory_removed_under_a_living_process_is_made_again(
        self, home: str, later: bool
    ) -> None:
        old = register.enter(home, SandboxRecord(id=ID), later=later)
        shutil.rmtree(home)
        new = register.enter(home, SandboxRecord(id=OTHER), later=later)
        new.update(name="x")
        assert [record.id for record in register.living(home)] == [OTHER]
        old.close()
        new.close()

    def test_a_forked_childs_copy_does_nothing_and_its_own_is_its_own(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        child = os.fork()
        if not child:
            code = 1
            try:
                entry.update(workspace="/child")
                entry.close()
                own = register.enter(home, SandboxRecord(id=OTHER))
                seen = {record.id: record.supervisor for record in register.living(home)}
                own.close()
                register.shutdown()
                code = 0 if seen == {ID: os.getppid(), OTHER: os.getpid()} else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (record,) = register.living(home)
        assert (record.id, record.workspace) == (ID, "")
        entry.close()

    def test_a_fork_while_a_thread_is_in_the_register_does_not_hang(self, home: str) -> None:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                register.enter(home, SandboxRecord(id=ID)).close()
                register.sweep(home)

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            for _ in range(20):
                child = os.fork()
                if not child:
                    try:
                        register.enter(home, SandboxRecord(id=OTHER)).close()
                        register.shutdown()
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
        finally:
            stop.set()
            thread.join()
        register.sweep(home)  # a child may have ended between two steps of its parent's thread


FULL = """
import errno, os, sys
from stockade import state
from stockade.errors import SetupError
from stockade.runs.register import register
home = state.ensure(sys.argv[1] + "/state")
os.mkdir(home + "/run")
entry = register.enter(home, register.SandboxRecord(id="aa")) if sys.argv[2] == "update" else None
try:
    if sys.argv[3] == "size":
        with open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass
    for number in range(10_000):
        open(f"{sys.argv[1]}/{number}", "x").close()
except OSError as error:
    assert error.errno == errno.ENOSPC, error
try:
    if entry:
        while True:  # until the page that the record has is full
            entry.update(workspace="/x" * 200)
    register.enter(home, register.SandboxRecord(id="cd")).close()
except SetupError as error:
    print(error.stage, errno.errorcode[error.errno], "free some space" in error.hint)
print(sorted(name for one in os.listdir(home + "/run") for name in os.listdir(f"{home}/run/{one}")))
if entry:
    print([record.id for record in register.living(home)])
    entry.close()
register.shutdown()
print(os.listdir(home + "/run"))
"""


def _on_a_full_disk(place: Path, code: str, limit: str, *arguments: str) -> str:
    mount = f'mount -t tmpfs -o {limit} none "$1" && shift && exec "$@"'
    apart = ("unshare", "-Urm", "sh", "-c", mount, "sh")
    command = [*apart, str(place), sys.executable, "-c", code, str(place), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


class TestFullDisk:
    @pytest.mark.parametrize(
        ("when", "what", "left"),
        [
            ("first", "size", "['lock', 'sandboxes']"),
            ("first", "inodes", "[]"),
            ("update", "size", "['lock', 'sandboxes']\n['aa']"),
        ],
    )
    def test_a_full_disk_is_a_setup_error_and_nothing_is_half_done(
        self, tmp_path: Path, when: str, what: str, left: str
    ) -> None:
        limit = "size=32k" if what == "size" else "nr_inodes=40"
        said = _on_a_full_disk(tmp_path, FULL, limit, when, what)
        assert said == f"state ENOSPC True\n{left}\n[]\n"

    def test_a_register_that_cannot_be_written_is_a_setup_error(self, home: str) -> None:
        Path(state.ensure(home), "run").touch()
        with pytest.raises(SetupError, match="cannot record the sandbox") as caught:
            register.enter(home, SandboxRecord(id=ID))
        assert (caught.value.stage, caught.value.errno) == ("state", errno.ENOTDIR)
        assert "STOCKADE_HOME" in caught.value.hint
        with pytest.raises(SetupError, match="Not a directory"):
            register.living(home)

    def test_a_process_that_has_had_a_sandbox_needs_no_room_for_the_next(self, tmp_path: Path) -> None:
        entered = 'entry = register.enter(home, register.SandboxRecord(id="aa"))'
        again = FULL.replace(entered, f"{entered}; entry.close(); entry = None").replace("update", "later")
        for limit, what in (("size=32k", "size"), ("nr_inodes=40", "inodes")):
            assert _on_a_full_disk(tmp_path, again, limit, "later", what) == "['lock', 'sandboxes']\n[]\n"

    def test_half_a_change_does_not_count(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        length = (directories(home)[0] / FILE).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + 20, hard))
        try:
            with pytest.raises(SetupError, match="No space"):
                entry.update(workspace="/somewhere")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert register.survey(home) == ([entry.record], [])
        entry.update(workspace="/elsewhere")
        assert [record.workspace for record in register.living(home)] == ["/elsewhere"]
        entry.close()


class TestLooking:
    def test_no_state_no_sandboxes(self, home: str) -> None:
        assert register.living(home) == []
        assert register.sweep(home) == []
        assert not os.path.exists(home)

    def test_other_processes_are_listed_until_they_die(self, home: str) -> None:
        with supervisor(Path(home), id=ID, command=["a"]) as process:
            (record,) = register.living(home)
            assert (record.id, record.supervisor) == (ID, process.pid)
            process.kill()
            process.wait()
            assert register.living(home) == []
        assert register.sweep(home) == [ID]

    @pytest.mark.parametrize(
        "content",
        [
            b"{", b"{}", b" ", b"\xff\xff", b"[]", line(id="../../x"), line(layer="../../x"), line(gate="1"),
            line()[:-1],
            b'{"id":"aa","later":' + b"[" * 9000 + b"]" * 9000 + b"}",
            line(id="aa", gate=1 << 40, gate_born=1),
            line(id="aa", supervisor=-1),
        ],
        ids=[
            "cut", "empty", "blank", "bytes", "list", "name", "layer", "type", "unended", "deep", "gate",
            "supervisor",
        ],
    )  # fmt: skip
    def test_a_damaged_record_is_skipped_with_a_word(
        self, home: str, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        entry = register.enter(home, SandboxRecord(id=OTHER))
        left = dead(home, content, line())
        with caplog.at_level(logging.WARNING, "stockade"):
            assert [record.id for record in register.living(home)] == [OTHER]
            assert register.sweep(home) == [ID]
        assert f"{left / FILE} is damaged, and" in caplog.text and f"{left / FILE} is damaged:" in caplog.text
        entry.close()

    @pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
    def test_what_is_no_file_is_not_read(self, home: str, tmp_path: Path, kind: str) -> None:
        path = dead(home, line()) / FILE
        path.rename(tmp_path / "target")
        {"link": lambda: path.symlink_to(tmp_path / "target"), "directory": path.mkdir}.get(
            kind, lambda: os.mkfifo(path)
        )()
        assert register.survey(home) == ([], [f"{path} is damaged, and what cannot be read was skipped"])
        path.rmdir() if kind == "directory" else path.unlink()
        register.sweep(home)

    def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known(self, home: str) -> None:
        me = {"supervisor": os.getpid(), "supervisor_born": sandbox_record.born(os.getpid())}
        left = dead(home, line(invented={"by": ["later"]}, **me))
        assert [record.id for record in register.living(home)] == [ID]
        shutil.rmtree(left)


class TestEnding:
    def test_a_gate_that_obeys_is_not_killed(self, home: str) -> None:
        with stand_in() as gate, supervisor(Path(home), id=ID, gate=gate.pid):
            register.end(home, ID[:4], now=False)
            assert gate.wait() == -signal.SIGTERM
        register.sweep(home)

    @pytest.mark.parametrize("now", [True, False])
    def test_a_gate_that_does_not_obey_is_killed(
        self, home: str, now: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(register, "PATIENCE", 60 if now else 0.3)
        with stand_in("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done") as gate:
            time.sleep(0.3)  # until it is deaf
            entry = register.enter(home, SandboxRecord(id=ID, gate=gate.pid))
            assert not entry.was_killed()
            began = time.monotonic()
            register.end(home, ID, now=now)
            assert (time.monotonic() - began > register.PATIENCE) != now
            assert gate.wait() == -signal.SIGKILL
            assert entry.was_killed()
            assert register.living(home) == []  # although its supervisor has not looked yet
            entry.close()

    def test_one_that_is_being_started_is_waited_for(self, home: str) -> None:
        with stand_in() as gate:
            entry = register.enter(home, SandboxRecord(id=ID))
            with ThreadPoolExecutor(1) as pool:
                ending = pool.submit(register.end, home, ID, now=True)
                while not entry.was_killed():
                    time.sleep(0.01)
                entry.update(gate=gate.pid)
                ending.result(10)
            assert gate.wait() == -signal.SIGKILL
            entry.close()

    def test_one_that_ends_before_it_has_started_has_ended(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(register.end, home, ID, now=True)
            while not entry.was_killed():
                time.sleep(0.01)
            entry.close()
            ending.result(10)

    def test_a_beginning_must_name_one(self, home: str) -> None:
        one, other = (register.enter(home, SandboxRecord(id=id)) for id in (ID, OTHER))
        with pytest.raises(NotFoundError, match=f"stands for several sandboxes: {ID}, {OTHER}") as caught:
            register.find(home, "0123")
        assert "more" in caught.value.hint
        for word in ("", "f", "0123456789abc", "../"):
            with pytest.raises(NotFoundError) as caught:
                register.end(home, word, now=True)
            assert "stockade ps" in caught.value.hint
        assert register.find(home, "01234").id == ID
        one.close()
        other.close()

    def test_a_sandbox_of_another_pid_namespace_is_seen_and_not_mistaken(self, home: str) -> None:
        state.ensure(home)
        apart = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
        with stand_in() as stranger:
            with supervisor(Path(home), around=apart, id=ID, gate=1):
                (record,) = register.living(home)
                assert (record.id, record.supervisor, record.here) == (ID, 1, False)
                with pytest.raises(SetupError, match="another container"):
                    register.end(home, ID, now=True)
                assert register.sweep(home) == []
            end = time.monotonic() + 10
            while not (found := register.sweep(home)) and time.monotonic() < end:
                time.sleep(0.01)
            assert found == [ID]
            assert stranger.poll() is None
