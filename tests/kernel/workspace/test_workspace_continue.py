"""A workspace outlives its sandbox: others go on with it, and a living one can be committed from."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import AsyncSandbox, ConflictError, Policy, PolicyError, Sandbox, SetupError, Workspace
from stockade.linux.procstat import STATE, stat_fields
from stockade.runs.register import register
from support.trees import changed, snapshot

#: Writes a file anew for ever, never in place: 64 times the same number each time.
WRITER = "n=0; while :; do n=$((n+1)); yes $n | head -64 > part; mv part live; done"


def layer(workspace: Path) -> Workspace:
    return changed(workspace, "echo one > one")


def test_commands_in_a_row_go_on_in_one_workspace(workspace: Path) -> None:
    first = layer(workspace)
    second = stockade.run(["sh", "-c", "cat one; echo two > two"], resume=first)
    assert second.ok and second.text == "one\n"
    assert second.workspace_id == first.id
    assert [change.path for change in second.changes] == ["one", "two"]
    with Sandbox(Policy(workspace=str(workspace)), resume=first.id[:6]) as box:
        assert box.run(["cat", "two"]).text == "two\n"
        assert box.run(["rm", "one"]).workspace_id == first.id

    async def again() -> str:
        async with AsyncSandbox(resume=first) as box:
            return (await box.run(["ls"])).text

    assert asyncio.run(again()) == "two\n"
    assert not list(workspace.iterdir())
    assert [one.id for one in Workspace.list()] == [first.id]


def test_a_continued_workspace_stays_also_without_changes(workspace: Path) -> None:
    first = layer(workspace)
    result = stockade.run(["rm", "one"], resume=first)
    assert result.workspace_id == first.id and not result.changes
    assert stockade.run(["sh", "-c", "echo 1 > one"], resume=first).changes


def test_a_command_that_cannot_be_started_leaves_a_continued_workspace(workspace: Path) -> None:
    first = layer(workspace)
    assert not stockade.run(["./no-such-program"], resume=first).ok
    with pytest.raises(PolicyError):
        stockade.run(["true"], Policy(limits={"files": 1 << 20}), resume=first)
    assert [change.path for change in first.changes()] == ["one"]


def test_discarding_a_continued_workspace_discards_it_all(workspace: Path) -> None:
    first = layer(workspace)
    stockade.run(["sh", "-c", "echo two > two"], resume=first, on_exit="discard")
    assert not Workspace.list()


def test_the_policy_must_fit(workspace: Path, tmp_path: Path) -> None:
    first = layer(workspace)
    with pytest.raises(PolicyError, match="is an overlay"):
        stockade.run(["true"], Policy(workspace={"path": str(workspace), "mode": "rw"}), resume=first)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(PolicyError, match="belongs to "):
        stockade.run(["true"], Policy(workspace=str(other)), resume=first)
    assert [change.path for change in first.changes()] == ["one"]


def test_a_workspace_of_another_state_is_refused(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layer(workspace)
    monkeypatch.setenv("STOCKADE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(PolicyError, match="is kept in"):
        stockade.run(["true"], resume=first)


def test_one_in_use_says_by_whom(workspace: Path) -> None:
    first = layer(workspace)
    with Sandbox(resume=first), pytest.raises(SetupError, match=f"in use by process {os.getpid()}"):
        stockade.run(["true"], resume=first)


def test_another_directory_in_its_place_is_refused(workspace: Path) -> None:
    first = layer(workspace)
    workspace.rename(workspace.with_name("moved"))
    workspace.mkdir()
    with pytest.raises(SetupError, match="no longer the directory"):
        stockade.run(["true"], resume=first)


def test_a_damaged_layer_is_refused(workspace: Path) -> None:
    first = layer(workspace)
    os.rename(f"{first.layer}/work", f"{first.layer}/gone")
    with pytest.raises(SetupError, match="cannot be continued"):
        stockade.run(["true"], resume=first)
    os.symlink("gone", f"{first.layer}/work")
    with pytest.raises(SetupError, match="cannot be continued"):
        stockade.run(["true"], resume=first)


def test_the_mode_of_the_tree_is_as_it_was_left(workspace: Path) -> None:
    workspace.chmod(0o750)
    first = changed(workspace, "chmod 711 .")
    assert stockade.run(["stat", "-c", "%a", "."], resume=first).text == "711\n"
    assert [change.path for change in first.changes()] == ["."]


@pytest.mark.parametrize("made", ["echo mine > secret", "mkdir secret; echo mine > secret/x"])
def test_what_an_earlier_run_made_cannot_be_denied(workspace: Path, made: str) -> None:
    first = changed(workspace, made)
    with pytest.raises(PolicyError, match="an earlier run"):
        stockade.run(["true"], Policy(deny=[f"{workspace}/secret"]), resume=first)


def test_what_only_the_host_has_can_be_denied_later(workspace: Path) -> None:
    (workspace / "secret").write_text("the host's")
    first = layer(workspace)
    result = stockade.run(["ls"], Policy(deny=[f"{workspace}/secret"]), resume=first)
    assert result.text == "one\n"


def test_what_one_of_the_runs_was_denied_is_held_back_for_all(workspace: Path) -> None:
    first = layer(workspace)
    policy = Policy(deny=[f"{workspace}/secret"], protect=["kept"])
    stockade.run(["sh", "-c", "echo mine > secret; echo mine > kept"], policy, resume=first)
    done = Workspace.open(first.id).commit()
    assert {held.path for held in done.held} == {"secret", "kept"}
    assert os.listdir(workspace) == ["one"]


def test_an_interrupted_commit_is_recovered_first(workspace: Path) -> None:
    first = layer(workspace)
    pid = os.fork()
    if not pid:
        # Killed when everything lies ready.
        from stockade.workspace import journal

        journal.apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        first.commit()
        os._exit(0)
    os.waitpid(pid, 0)
    assert stockade.run(["cat", "one"], resume=first).text == "one\n"
    assert os.listdir(workspace) == ["one"]


def test_a_run_can_commit_at_its_end(workspace: Path) -> None:
    result = stockade.run(
        ["sh", "-c", "echo 1 > new; exit 3"], Policy(workspace=str(workspace)), on_exit="commit"
    )
    assert result.exit_code == 3 and result.committed is not None and result.committed.closed
    assert (workspace / "new").read_text() == "1\n"
    assert not result.workspace_id and not Workspace.list()


def test_what_a_commit_at_the_end_holds_back_is_kept(workspace: Path) -> None:
    script = "echo 1 > new; mkdir .git; mkdir .git/hooks; echo evil > .git/hooks/pre-commit"
    result = stockade.run(["sh", "-c", script], Policy(workspace=str(workspace)), on_exit="commit")
    assert result.committed is not None and result.committed.held
    assert (workspace / "new").exists() and not (workspace / ".git/hooks").exists()
    assert [one.id for one in Workspace.list()] == [result.workspace_id]


def test_a_conflict_at_the_end_is_told_and_nothing_is_lost(workspace: Path) -> None:
    (workspace / "file").write_text("old")
    with Sandbox(Policy(workspace=str(workspace))) as box:
        id = box.run(["sh", "-c", "echo theirs > file"]).workspace_id
    (workspace / "file").write_text("the host's")
    result = stockade.run(["true"], resume=id, on_exit="commit")
    assert result.ok and result.committed is None and "file" in result.commit_error
    assert (workspace / "file").read_text() == "the host's"
    with pytest.raises(ConflictError), Sandbox(resume=id, on_exit="commit"):
        pass
    assert [one.id for one in Workspace.list()] == [id]


def test_a_run_that_was_cut_short_commits_nothing(workspace: Path) -> None:
    command = ["sh", "-c", "echo half > file; sleep 60"]
    result = stockade.run(command, Policy(workspace=str(workspace)), on_exit="commit", timeout=0.3, grace=0.1)
    assert result.outcome == "timed-out" and "did not finish" in result.commit_error
    assert not list(workspace.iterdir()) and result.workspace_id


def test_a_with_statement_that_raises_commits_nothing(workspace: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Sandbox(Policy(workspace=str(workspace)), on_exit="commit") as box,
    ):
        box.run(["touch", "file"])
        raise ZeroDivisionError
    assert not list(workspace.iterdir()) and len(Workspace.list()) == 1


def test_a_living_sandbox_can_be_committed_from_again_and_again(workspace: Path) -> None:
    (workspace / "old").write_text("old\n")
    (workspace / "gone").write_text("old\n")
    with Sandbox(Policy(workspace=str(workspace))) as box:
        box.run(["sh", "-c", "echo 1 >> old; rm gone; mkdir -p d/e; echo 1 > d/e/f"])
        assert {change.path for change in box.workspace.changes()} == {"old", "gone", "d", "d/e", "d/e/f"}
        done = box.workspace.commit()
        assert len(done.changes) == 5 and not done.closed
        assert not box.workspace.changes()
        result = box.run(["sh", "-c", "cat old d/e/f; ls; echo 2 >> old; echo back > gone; rm -r d"])
        assert result.text == "old\n1\n1\nd\nold\n"
        assert {change.path for change in result.changes} == {"old", "gone", "d"}
        box.workspace.commit(["old"])
        assert (workspace / "old").read_text() == "old\n1\n2\n" and (workspace / "d").exists()
        box.workspace.commit()
        box.run(["sh", "-c", "echo 3 >> old"])
        kept = box.workspace
    assert sorted(os.listdir(workspace)) == ["gone", "old"]
    # Not a conflict with what was committed before, also after the end.
    assert kept.commit().closed
    assert (workspace / "old").read_text() == "old\n1\n2\n3\n"


def test_a_host_that_changes_what_was_committed_is_a_conflict(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        box.run(["sh", "-c", "echo 1 > file"])
        box.workspace.commit()
        (workspace / "file").write_text("the host's\n")
        box.run(["sh", "-c", "echo 2 >> file"])
        with pytest.raises(ConflictError, match="file"):
            box.workspace.commit()
        kept = box.workspace
    with pytest.raises(ConflictError, match="file"):
        kept.commit()


def test_a_program_that_goes_on_writing_is_held_still(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        process = box.start(["sh", "-c", WRITER])
        last = 0
        for _ in range(5):
            time.sleep(0.05)
            box.workspace.commit(["live"])
            lines = (workspace / "live").read_text().split()
            assert len(lines) == 64 and len(set(lines)) == 1, "torn"
            assert int(lines[0]) > last, "the program did not go on"
            last = int(lines[0])
        process.kill()
        process.wait()
        process.close()


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_what_was_paused_right_before_a_commit_stays_paused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper stops the program when it reads the request: here long after the commit."""
    with Sandbox(Policy(workspace=str(workspace))) as box, box.start(["sh", "-c", WRITER]) as process:
        live = Path(box.workspace.layer, "upper", "live")
        _until(live.exists, "the program does not write")
        channel = process._channel
        assert channel is not None
        with monkeypatch.context() as late:
            late.setattr(channel, "signal", lambda *_, **__: None)
            process.pause()
        box.workspace.commit(["live"])
        assert stat_fields(f"/proc/{process.pid}")[STATE] == b"T"
        before = live.read_text()
        assert (workspace / "live").read_text() == before
        channel.signal(signal.SIGSTOP, everything=True)
        assert box.run(["cat", "live"]).text == before
        process.resume()
        _until(lambda: live.read_text() != before, "the resumed program does not go on")
        process.kill()


def test_a_commit_stops_no_process_of_the_host(workspace: Path) -> None:
    """A keeper that was paused has ended, and a process of the host has got its number."""
    with subprocess.Popen(["sh", "-c", "sleep 60; true"]) as reused:
        children = Path(f"/proc/{reused.pid}/task/{reused.pid}/children")
        _until(lambda: bool(children.read_text()), "the shell does not start its child")
        (child,) = map(int, children.read_text().split())
        try:
            with Sandbox(Policy(workspace=str(workspace))) as box:
                box._require_open()[0].paused.add(reused.pid)
                box.run(["touch", "new"])
                box.workspace.commit(["new"])
            assert stat_fields(f"/proc/{child}")[STATE] == b"S"
        finally:
            os.kill(child, signal.SIGKILL)
            reused.kill()


def test_a_gate_that_is_late_stops_nothing_after_a_commit(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box, box.start(["sh", "-c", WRITER]) as process:
        live = Path(box.workspace.layer, "upper", "live")
        _until(live.exists, "the program does not write")
        gate = box._require_open()[0]
        with box.workspace._alone():
            os.kill(gate.number(), signal.SIGSTOP)
            gate.connection.signal(signal.SIGSTOP, everything=True)
            threading.Timer(0.1, os.kill, (gate.number(), signal.SIGCONT)).start()
        before = box.run(["cat", "live"]).text  # by then the gate has carried out every earlier request
        _until(lambda: live.read_text() != before, "the program does not go on")
        process.kill()


def test_a_paused_sandbox_stays_paused_and_a_resumed_one_goes_on(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box, box.start(["sh", "-c", WRITER]) as process:
        time.sleep(0.1)
        for _ in range(10):
            box.pause()
            box.workspace.commit(["live"])
            before = (workspace / "live").read_text()
            time.sleep(0.02)
            assert Path(box.workspace.layer, "upper", "live").read_text() == before
            box.resume()
            box.workspace.changes()
            end = time.monotonic() + 10
            while Path(box.workspace.layer, "upper", "live").read_text() == before:
                assert time.monotonic() < end, "the resumed program does not go on"
                time.sleep(0.01)
        process.kill()


def test_nothing_starts_while_it_is_held_still(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        box.run(["touch", "file"])
        order: list[str] = []
        runner = threading.Thread(target=lambda: (box.run(["true"]), order.append("run")))
        with box.workspace._alone():
            runner.start()
            time.sleep(0.2)
            order.append("held")
        runner.join()
        assert order == ["held", "run"]


def test_a_living_workspace_cannot_be_discarded(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        box.run(["touch", "file"])
        with pytest.raises(SetupError, match="lives in it"):
            box.workspace.discard()
        assert box.run(["ls"]).text == "file\n"


def test_a_sandbox_without_an_overlay_has_no_workspace(workspace: Path) -> None:
    for policy in (Policy(), Policy(workspace={"path": str(workspace), "mode": "ro"})):
        with Sandbox(policy) as box, pytest.raises(PolicyError, match="no overlay"):
            _ = box.workspace


KILLED = """
import os, signal, sys, stockade
with stockade.Sandbox(resume=sys.argv[1]) as box:
    box.run(["sh", "-c", "echo two > two"])
    box.start(["sh", "-c", "sleep 0.3; echo late > late; sleep 60"])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("swept")
def test_the_supervisor_of_a_continued_workspace_is_killed(workspace: Path, stockade_home: Path) -> None:
    first = layer(workspace)
    killed = subprocess.run([sys.executable, "-c", KILLED, first.id], check=False)
    assert killed.returncode == -signal.SIGKILL
    result = stockade.run(["ls"], resume=first)
    assert result.text == "one\ntwo\n"
    time.sleep(0.4)
    assert not os.path.exists(f"{first.layer}/upper/late")
    register.sweep(str(stockade_home))
    assert {change.path for change in first.changes()} == {"one", "two"}
    assert snapshot(workspace).keys() == {""}


@pytest.mark.usefixtures("swept")
def test_a_sweep_leaves_a_workspace_alone_that_is_in_use(workspace: Path, stockade_home: Path) -> None:
    """What a killed supervisor began, another goes on with: committed and so unchanged, but in use."""
    code = KILLED.replace("resume=sys.argv[1]", "stockade.Policy(workspace=sys.argv[1])")
    subprocess.run([sys.executable, "-c", code, str(workspace)], check=False)
    (first,) = Workspace.list()
    register._swept.add(str(stockade_home))
    with Sandbox(resume=first) as box:
        box.workspace.commit()
        assert not box.workspace.changes()
        register.sweep(str(stockade_home))
        assert box.run(["sh", "-c", "echo 3 > three; ls"]).text == "three\ntwo\n"
    assert [change.path for change in first.changes()] == ["three"]


def test_an_async_sandbox_that_nobody_closed_commits_nothing(workspace: Path) -> None:
    async def main() -> None:
        box = AsyncSandbox(Policy(workspace=str(workspace)), on_exit="commit")
        await box.open()
        await box.run(["sh", "-c", "echo x > new"])
        with pytest.warns(ResourceWarning):
            del box
            gc.collect()

    asyncio.run(main())
    assert not (workspace / "new").exists() and len(Workspace.list()) == 1
