"""`stockade purge`, the layout of the state directory, and whose it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox, Workspace, cli, state
from stockade.linux import dirwalk
from stockade.linux.user import Caller
from stockade.receipt import chain
from stockade.resolve import trust
from support.means import applies
from support.paths import ROOT
from support.screen import STOCKADE, seen

FIXTURES = ROOT / "tests" / "fixtures" / "state"


@pytest.fixture
def used(stockade_home: Path, workspace: Path) -> Path:
    """A state directory with something of everything."""
    (workspace / "stockade.toml").write_text("")
    policy = Policy(workspace=str(workspace), limits={"output": 5})
    result = stockade.run(["sh", "-c", "mkdir -m 0 closed; echo 1 > new; echo too much"], policy)
    Workspace.open(result.workspace_id).snapshot("first")
    assert cli.main(["trust", str(workspace)]) == 0
    return stockade_home


def test_everything_that_is_kept_has_a_name_that_purge_knows(used: Path) -> None:
    names = {path.name for path in used.iterdir()}
    assert names <= set(state.ENTRIES) and names >= {"workspaces", "output", "runs.log", "trust", "cache"}


def test_it_needs_nothing_that_only_a_server_needs(used: Path) -> None:
    code = "import sys; sys.modules['litestar'] = None; from stockade.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, "purge", "--yes"], check=True, stdin=subprocess.DEVNULL)
    assert not used.exists()


def test_it_removes_everything(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["purge", "--yes"]) == 0
    said = capsys.readouterr()
    assert not used.exists() and "removed Stockade's state from" in said.out
    for entry in ("workspaces", "trust", "runs.log", "output", "cache"):
        assert f"  {entry} " in said.err
    assert stockade.run(["true"]).ok, "and what comes next finds a new one"


def test_a_purge_that_is_cut_short_leaves_nothing_for_the_next_log_to_trip_over(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.shutdown()
    (used / "receipts.db-wal").touch()
    remove = dirwalk.remove

    def once(place: int, name: str) -> None:
        remove(place, name)
        if name == "receipts.db":
            raise OSError(5, "cut short")

    monkeypatch.setattr(dirwalk, "remove", once)
    assert cli.main(["purge", "--yes"]) == 125
    assert used.exists() and not list(used.glob("receipts.db*"))
    assert stockade.run(["true"]).ok


def test_where_there_is_nothing_nothing_is_done(
    stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["purge"]) == 0
    assert "does not exist" in capsys.readouterr().out and not stockade_home.exists()


def test_without_anybody_to_ask_it_is_refused(used: Path) -> None:
    done = subprocess.run(
        [STOCKADE, "purge"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 125 and "--yes" in done.stderr and (used / "workspaces").exists()


@pytest.mark.parametrize(("answer", "gone"), [(b"y\n", True), (b"\n", False), (b"no\n", False)])
def test_at_a_terminal_it_asks(used: Path, answer: bytes, gone: bool) -> None:
    code, screen = seen([STOCKADE, "purge"], typed=answer)
    assert "[y/N]" in screen and (code == 0) == gone and used.exists() != gone


def test_what_is_not_stockades_is_left(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (used / "diary.txt").write_text("mine")
    assert cli.main(["purge", "--yes", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["left"] == ["diary.txt"]
    assert [path.name for path in used.iterdir()] == ["diary.txt"] and "not Stockade's" in said.err


def test_a_directory_that_only_looks_like_one_is_refused(
    stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stockade_home / "output").mkdir(parents=True)
    stockade_home.chmod(0o700)
    assert cli.main(["purge", "--yes"]) == 125
    assert "is not a state directory of Stockade" in capsys.readouterr().err
    assert [path.name for path in stockade_home.iterdir()] == ["output"]


def test_while_a_sandbox_lives_it_is_refused(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox() as box:
        assert cli.main(["purge", "--yes"]) == 125
        assert "1 sandbox still running" in capsys.readouterr().err
        assert (used / "workspaces").exists() and box.run(["true"]).ok
    assert cli.main(["purge", "--yes"]) == 0


def test_while_a_server_runs_it_is_refused(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (used / "server").mkdir()
    code = (
        "import fcntl, os, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX);"
        "print(os.getpid(), file=lock, flush=True); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(used / "server" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"locked\n"
        assert cli.main(["purge", "--yes"]) == 125
        assert f"`kill {server.pid}`" in capsys.readouterr().err
        server.communicate()
    assert cli.main(["purge", "--yes"]) == 0


def test_while_a_workspace_is_in_use_it_is_refused(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept,) = Workspace.list()
    with kept.files:
        assert cli.main(["purge", "--yes"]) == 125
        assert f"workspace {kept.id}" in capsys.readouterr().err
    assert cli.main(["purge", "--yes"]) == 0


def test_a_damaged_workspace_goes_as_well(used: Path) -> None:
    (layer,) = (used / "workspaces").iterdir()
    (layer / "workspace.json").write_text("{")
    assert cli.main(["purge", "--yes"]) == 0
    assert not used.exists()


class TestSchema:
    """Directories as earlier versions left them are in tests/fixtures."""

    @pytest.fixture
    def first(self, stockade_home: Path, workspace: Path) -> Path:
        """A state directory of schema 1."""
        shutil.copytree(FIXTURES / "1", stockade_home)
        stockade_home.chmod(0o700)
        for record in stockade_home.glob("workspaces/*/workspace.json"):
            record.write_text(record.read_text().replace("@WORKSPACE@", str(workspace)))
            for name in ("upper", "work"):
                (record.parent / name).mkdir(exist_ok=True)
        return stockade_home

    def test_an_older_layout_is_brought_up_to_date(self, first: Path) -> None:
        before = (first / "trust").read_bytes()
        assert stockade.run(["true"]).ok
        assert (first / "schema").read_text() == f"{state.SCHEMA}\n"
        assert list(first.glob("filter-*")) + list(first.glob("host-*")) == []
        assert (first / "trust").read_bytes() == before
        (kept,) = Workspace.list()
        assert [change.path for change in kept.changes()] == ["added.txt"]

    @pytest.fixture
    def second(self, first: Path) -> Path:
        """A state directory of schema 2, in which trust was in the bytes of a policy only."""
        workspace = json.loads(next(first.glob("workspaces/*/workspace.json")).read_text())["lower"]
        shutil.rmtree(first)
        shutil.copytree(FIXTURES / "2", first)
        first.chmod(0o700)
        (record,) = first.glob("workspaces/*/workspace.json")
        record.write_text(record.read_text().replace("@WORKSPACE@", workspace))
        (record.parent / "work").mkdir()
        return first

    def test_trust_in_bytes_alone_is_kept_and_asked_about(
        self, second: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert stockade.run(["true"]).ok
        assert (second / "schema").read_text() == f"{state.SCHEMA}\n"
        ((path, agreed),) = trust.recorded(str(second)).items()
        assert (path, agreed.hash, agreed.paths) == ("/home/ada/project/stockade.toml", "0" * 64, None)
        (kept,) = Workspace.list()
        assert [change.path for change in kept.changes()] == ["added.txt"]
        assert kept.commit().closed

    def test_reading_it_changes_nothing(self, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["workspaces"]) == 0 and cli.main(["trust", "--list"]) == 0
        assert (first / "schema").read_text() == "1\n" and list(first.glob("filter-*"))

    def test_an_upgrade_that_was_cut_short_is_taken_up_again(self, first: Path) -> None:
        (first / "schema.new").write_text("")
        next(first.glob("filter-*")).unlink()
        state.ensure(str(first))
        assert (first / "schema").read_text() == f"{state.SCHEMA}\n" and not (first / "schema.new").exists()

    def test_processes_that_upgrade_at_once_agree(self, first: Path) -> None:
        code = "import sys; from stockade import state; state.ensure(sys.argv[1])"
        ours = [subprocess.Popen([sys.executable, "-c", code, str(first)]) for _ in range(4)]
        assert [one.wait(60) for one in ours] == [0] * 4
        assert (first / "schema").read_text() == f"{state.SCHEMA}\n"

    @pytest.mark.parametrize("words", [["run", "--", "true"], ["ps"], ["workspaces"], ["logs"],
                                       ["trust", "--list"], ["purge", "--yes"]], ids=" ".join)  # fmt: skip
    def test_a_newer_one_is_refused_and_not_touched(
        self, first: Path, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        (first / "schema").write_text(f"{state.SCHEMA + 1}\n")
        before = {path: path.stat().st_mtime_ns for path in [first, *first.rglob("*")]}
        assert cli.main(words) == 125
        said = f"newer version of Stockade (schema {state.SCHEMA + 1}, this one knows {state.SCHEMA})"
        assert said in capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in [first, *first.rglob("*")]} == before

    @pytest.mark.parametrize("content", ["", "one\n", "0\n", "-1\n", "\0"])
    def test_one_that_says_nothing_is_refused(self, first: Path, content: str) -> None:
        (first / "schema").write_text(content)
        with pytest.raises(stockade.SetupError, match="holds no version number"):
            state.ensure(str(first))


class TestOwners:
    """Root's state and a user's never mix."""

    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The home of an ordinary user, kept by sudo."""
        applies(os.geteuid() == 0, "for root only: it is about sudo")
        home = tmp_path / "home"
        home.mkdir()
        os.chown(home, 65534, 65534)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("STOCKADE_HOME")
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        return home

    def test_with_a_users_home_root_has_its_own(self, home: Path) -> None:
        caller = Caller.current()
        assert caller.home == str(home)
        assert state.state_dir(caller.environ, caller.home) == "/root/.local/state/stockade"

    def test_nor_is_the_users_variable_believed(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
        assert state.state_dir(os.environ, str(home)) == "/root/.local/state/stockade"

    def test_a_run_leaves_nothing_in_the_users_home(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = tmp_path / "root"
        monkeypatch.setattr(state, "_roots_home", lambda: str(own))
        assert stockade.run(["true"]).ok
        assert (own / ".local/state/stockade/schema").exists() and list(home.iterdir()) == []

    def test_a_users_directory_is_refused_where_it_is_named(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs = home / "state"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 65534, 65534)
        monkeypatch.setenv("STOCKADE_HOME", str(theirs))
        with pytest.raises(stockade.SetupError, match="belongs to uid 65534, not to you"):
            state.ensure(state.state_dir(os.environ, str(home)))
        assert list(theirs.iterdir()) == []
