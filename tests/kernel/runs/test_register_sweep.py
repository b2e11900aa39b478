"""The collection of what a killed supervisor left."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stockade import state
from stockade.runs.register import register, sandbox_record
from stockade.runs.register.record_file import FILE
from stockade.runs.register.sandbox_record import SandboxRecord
from stockade.workspace.overlay import OverlayLayer
from support.supervisors import ID, dead, directories, line, stand_in, supervisor

OTHER = "0123ffffffff"
SWEEP = "import sys; from stockade.runs.register import register; print(register.sweep(sys.argv[1]))"


@pytest.fixture
def home(stockade_home: Path) -> str:
    return str(stockade_home)


def _make_sandboxes_for_ever(home: str, workspaces: Path) -> None:
    """Make the layers that records name, several at a time, and outgrow the records' slots."""
    while True:
        ids = [register.new_id() for _ in range(3)]
        entries = [register.enter(home, SandboxRecord(id=id, layer=id)) for id in ids]
        for id in ids:
            (workspaces / id).mkdir()
        for length in (10, 3000, 4000):
            for entry in entries:
                entry.update(workspace="/" * length)
        for id, entry in zip(ids, entries, strict=True):
            (workspaces / id).rmdir()
            entry.close()


class TestSweeping:
    def test_a_gate_that_outlived_its_supervisor_is_killed(self, home: str) -> None:
        with stand_in() as gate:
            with supervisor(Path(home), id=ID, gate=gate.pid):
                assert register.sweep(home) == []  # it lives
            assert register.sweep(home) == [ID]
            assert gate.wait() == -signal.SIGKILL
        assert directories(home) == []

    def test_a_process_that_has_the_number_of_a_gate_is_let_alone(self, home: str) -> None:
        with stand_in() as stranger:
            dead(home, line(gate=stranger.pid, gate_born=sandbox_record.born(stranger.pid) - 1))
            assert register.sweep(home) == [ID]
            assert stranger.poll() is None

    @pytest.mark.parametrize("where", ["another-boot pid:[1]", ""])
    def test_numbers_of_another_boot_or_container_mean_nothing(self, home: str, where: str) -> None:
        with stand_in() as stranger:
            fields = {"gate": stranger.pid, "gate_born": sandbox_record.born(stranger.pid), "where": where}
            dead(home, line(**fields, groups=["/sys/fs/cgroup/x"]))
            removed: list[object] = []
            assert register.sweep(home, removed.append) == [ID]
            assert removed == [] and stranger.poll() is None

    def test_the_first_sandbox_of_a_process_sweeps(self, home: str) -> None:
        left = dead(home, line())
        register.enter(home, SandboxRecord(id=OTHER)).close()
        assert not left.exists()

    def test_cgroups_are_removed_and_what_stays_is_tried_again(
        self, home: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        left = dead(home, line(groups=["/sys/fs/cgroup/a", "/sys/fs/cgroup/b"]))
        with caplog.at_level(logging.WARNING, "stockade"):
            assert register.sweep(home, lambda paths: os.rmdir("/proc/self")) == []
        assert ID in caplog.text and left.exists()
        removed: list[object] = []
        assert register.sweep(home, removed.append) == [ID]
        assert removed == [("/sys/fs/cgroup/a", "/sys/fs/cgroup/b")]

    def test_half_written_files_go_with_the_directory(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        assert os.path.dirname(entry.scratch("stdout")) == str(directories(home)[0])
        entry.close()
        left = dead(home, line())
        (left / f"{ID}.stdout").write_bytes(b"half")
        register.sweep(home)
        assert not left.exists()

    def test_a_supervisor_killed_at_any_moment_leaves_nothing_that_the_sweep_does_not_find(
        self, home: str
    ) -> None:
        workspaces = Path(state.ensure(home), "workspaces")
        workspaces.mkdir()
        dice = random.Random(7)
        for _ in range(40):
            child = os.fork()
            if not child:
                try:
                    _make_sandboxes_for_ever(home, workspaces)
                finally:
                    os._exit(1)
            time.sleep(dice.uniform(0.003, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            register.sweep(home)
            assert os.listdir(workspaces) == [] and directories(home) == []

    def test_a_supervisor_that_lost_its_lock_by_accident_is_let_alone(self, home: str) -> None:
        loses = "import pathlib; [p.read_bytes() for p in pathlib.Path(home).rglob('lock')]"
        with stand_in() as gate:
            with supervisor(
                Path(home), f"{loses}; print('lost', flush=True); time.sleep(100)", id=ID, gate=gate.pid
            ) as it:
                assert it.stdout is not None and it.stdout.readline() == "lost\n"
                assert register.sweep(home) == []
                assert [record.id for record in register.living(home)] == [ID]
            assert register.sweep(home) == [ID]

    def test_two_sweepers_do_not_hurt_each_other_nor_those_who_start(self, home: str) -> None:
        for number in range(100):
            dead(home, line(id=f"{number:012x}"), name=f"1-{number:x}")
        code = """
import sys
from stockade.runs.register import register
found = register.sweep(sys.argv[1])
for number in range(40):
    entry = register.enter(sys.argv[1], register.SandboxRecord(id=register.new_id()))
    entry.update(workspace="/x")
    assert entry.record.id in [record.id for record in register.living(sys.argv[1])]
    found += register.sweep(sys.argv[1])
    entry.close()
    register.shutdown()
print(*found)
"""
        sweepers = [
            subprocess.Popen([sys.executable, "-c", code, home], stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        found = [id for sweeper in sweepers for id in sweeper.communicate()[0].split()]
        assert [sweeper.returncode for sweeper in sweepers] == [0] * 4
        assert sorted(found) == [f"{number:012x}" for number in range(100)]
        assert directories(home) == []

    @pytest.mark.parametrize("half", [False, True], ids=["swept", "half swept"])
    def test_a_directory_that_a_sweeper_takes_while_it_is_made_is_given_up(
        self, home: str, half: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lockf = fcntl.lockf
        met: list[Path] = []

        def late(*arguments: int) -> None:
            if not met:
                met.extend(directories(home))
                if half:
                    (met[0] / "lock").unlink()
                else:
                    subprocess.run([sys.executable, "-c", SWEEP, home], check=True)
            lockf(*arguments)

        monkeypatch.setattr(fcntl, "lockf", late)
        entry = register.enter(home, SandboxRecord(id=ID))
        assert len(met) == 1 and met[0] != Path(entry.scratch("x")).parent
        assert [record.id for record in register.living(home)] == [ID]
        subprocess.run([sys.executable, "-c", SWEEP, home], check=True)
        assert len(directories(home)) == 1
        entry.close()

    def test_threads_and_processes_take_turns(self, home: str) -> None:
        dead(home, line(groups=["/sys/fs/cgroup/a"]), line(id=OTHER))
        removed: list[object] = []
        lookers: list[threading.Thread] = []

        def remove(paths: object) -> None:
            removed.append(paths)
            for look in (register.living, lambda home: register.sweep(home, remove)):
                lookers.append(threading.Thread(target=look, args=[home]))
                lookers[-1].start()
            time.sleep(0.2)
            other = subprocess.run([sys.executable, "-c", SWEEP, home], stdout=subprocess.PIPE, check=True)
            assert other.stdout == b"[]\n"

        assert register.sweep(home, remove) == [ID, OTHER]
        for looker in lookers:
            looker.join()
        assert len(removed) == 1

    def test_no_link_is_followed(self, home: str, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "lock").touch()
        left = dead(home, line())
        shutil.copy(left / FILE, precious)
        (left / "spill").symlink_to(precious / "lock")
        link = left.parent / "2-bb"
        link.symlink_to(precious)
        assert register.sweep(home) == [ID]
        assert sorted(os.listdir(precious)) == ["lock", FILE]
        link.unlink()

    def test_a_damaged_record_is_told_and_removed(self, home: str, caplog: pytest.LogCaptureFixture) -> None:
        left = dead(home, b"{")
        with caplog.at_level(logging.WARNING, "stockade"):
            assert register.sweep(home) == []
        assert f"{left / FILE} is damaged" in caplog.text and not left.exists()

    def test_a_directory_of_the_first_version_goes(self, home: str) -> None:
        left = dead(home)
        (left / FILE).unlink()
        (left / f"{ID}.json").write_bytes(line() + b"\n")
        assert register.living(home) == [] and register.sweep(home) == []
        assert not left.exists()

    def test_a_record_that_was_being_moved_to_another_slot_counts_once(self, home: str) -> None:
        old = line(groups=["/sys/fs/cgroup/old"])
        dead(home, old, line(id=OTHER), line(groups=["/sys/fs/cgroup/new"]))
        removed: list[object] = []
        assert sorted(register.sweep(home, removed.append)) == [ID, OTHER]
        assert removed == [("/sys/fs/cgroup/new",)]

    def test_what_is_removed_is_not_removed_again_when_the_rest_is(self, home: str) -> None:
        left = dead(home, line(), line(id=OTHER, groups=["/sys/fs/cgroup/a"]))
        assert register.sweep(home, lambda paths: os.rmdir("/proc/self")) == [ID]
        assert left.exists()
        assert register.sweep(home, lambda paths: None) == [OTHER]
        assert not left.exists()

    def test_what_cannot_be_swept_does_not_keep_the_next_from_starting(
        self, home: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        left = dead(home, line())
        (left / "odd").mkdir()
        with caplog.at_level(logging.WARNING, "stockade"):
            register.enter(home, SandboxRecord(id=OTHER)).close()
        assert str(left) in caplog.text
        (left / "odd").rmdir()
        register.sweep(home)

    def test_the_library_prints_nothing(self, home: str) -> None:
        left = dead(home, b"{")
        done = subprocess.run([sys.executable, "-c", SWEEP, home], capture_output=True, check=True)
        assert (done.stdout, done.stderr) == (b"[]\n", b"") and not left.exists()


class TestLayers:
    @pytest.fixture
    def layer(self, home: str, workspace: Path) -> OverlayLayer:
        lower = os.open(workspace, os.O_RDONLY)
        try:
            layer = OverlayLayer(home, lower, str(workspace), ID)
        finally:
            os.close(lower)
        layer.close()
        return layer

    def test_an_unchanged_one_goes(self, home: str, workspace: Path, layer: OverlayLayer) -> None:
        dead(home, line(layer=layer.id, workspace=str(workspace)))
        register.sweep(home)
        assert not os.path.exists(layer.path)

    def test_a_changed_one_is_the_users(self, home: str, workspace: Path, layer: OverlayLayer) -> None:
        Path(layer.path, "upper", "thesis").write_text("all of it")
        dead(home, line(layer=layer.id, workspace=str(workspace)))
        assert register.sweep(home) == [ID]
        assert Path(layer.path, "upper", "thesis").read_text() == "all of it"

    def test_one_that_cannot_be_compared_stays(self, home: str, workspace: Path, layer: OverlayLayer) -> None:
        workspace.rmdir()
        dead(home, line(layer=layer.id, workspace=str(workspace)))
        assert register.sweep(home) == [ID]
        assert os.path.exists(layer.path)

    def test_one_that_was_only_begun_goes(self, home: str, workspace: Path) -> None:
        begun = Path(state.ensure(home), "workspaces", "ab")
        begun.mkdir(parents=True)
        dead(home, line(layer="ab", workspace=str(workspace)))
        dead(home, line(id=OTHER, layer="cd"), name="1-bb")
        assert register.sweep(home) == [ID, OTHER]
        assert not begun.exists()
