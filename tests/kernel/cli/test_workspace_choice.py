"""Which workspace and which paths a command means, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Workspace, cli
from stockade.workspace.diff import layer_walk
from support.cli import STOCKADE, calls_in
from support.trees import changed

Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "src").mkdir()
    (workspace / "src" / "code").write_text("old\n")
    return workspace


@pytest.fixture
def call(project: Path) -> Call:
    """`stockade` with these arguments in the workspace."""
    return calls_in(project)


def in_another_terminal(*arguments: str, cwd: Path) -> Done:
    """The same in a session of its own, as another shell has it."""
    command = [STOCKADE, *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )


class TestHere:
    def test_is_the_directory_or_one_below_it(self, project: Path, call: Call) -> None:
        here = changed(project, "echo x > here")
        for place in (project, project / "src"):
            done = call("diff", "--name-only", cwd=place)
            assert done.stdout == "here\n" and f"workspace {here.id} of {project}" in done.stderr

    def test_is_no_other_directory(self, project: Path, call: Call, tmp_path: Path) -> None:
        changed(project, "echo x > here")
        beside = project.with_name(f"{project.name}-2")
        beside.mkdir()
        for place in (tmp_path, beside):
            done = call("diff", cwd=place)
            assert done.returncode == 125 and not done.stdout
            assert f"no changes are kept for {place} or one above it" in done.stderr
            assert "name one: stockade diff ID" in done.stderr

    def test_is_where_a_link_leads(self, project: Path, call: Call, tmp_path: Path) -> None:
        changed(project, "echo x > here")
        (tmp_path / "link").symlink_to(project)
        assert call("diff", "--name-only", cwd=tmp_path / "link").stdout == "here\n"

    def test_is_nowhere_when_the_directory_is_gone(self, project: Path, call: Call, tmp_path: Path) -> None:
        changed(project, "echo x > here")
        script = f"mkdir gone && cd gone && rmdir ../gone && {STOCKADE} discard"
        # Python itself does not start in a directory that is gone, with a relative PYTHONPATH.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=project,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 125 and len(Workspace.list()) == 1


class TestSeveral:
    @pytest.mark.parametrize(
        "line",
        ["diff", "commit", "discard", "snapshot", "restore {x}", "fork", "merge @ @", "run -w @ -- true"],
    )
    def test_are_listed_and_nothing_is_done(self, project: Path, call: Call, line: str) -> None:
        found = [changed(project, f"seq {count} | xargs touch") for count in (1, 2)]
        done = call(*line.split())
        assert done.returncode == 125 and not done.stdout
        assert "there are 2 workspaces for this directory or one above it" in done.stderr
        for one, count in zip(found, ("1 change ", "2 changes"), strict=True):
            (row,) = (text for text in done.stderr.splitlines() if text.startswith(f"stockade:   {one.id}"))
            assert count in row and "s old" in row and row.endswith(str(project))
        usage = " ".join(line.split()[:1]).replace("run", "-w")
        assert f"{usage} " in done.stderr.rpartition("hint: ")[2] and found[1].id in done.stderr
        assert {one.id for one in Workspace.list()} == {one.id for one in found}
        assert sorted(os.listdir(project)) == ["file", "src"]

    def test_may_be_of_different_directories(self, project: Path, call: Call) -> None:
        inner = changed(project / "src", "echo x > inner")
        assert call("diff", "--name-only", cwd=project / "src").stdout == "inner\n"
        outer = changed(project, "echo x > outer")
        done = call("diff", cwd=project / "src")
        assert done.returncode == 125 and inner.id in done.stderr and outer.id in done.stderr
        assert call("diff", "--name-only").stdout == "outer\n"

    def test_with_hostile_names(self, project: Path, call: Call) -> None:
        evil = project / "\x1b]0;evil\x07\nstockade: all is well"
        evil.mkdir()
        for _ in range(2):
            changed(evil, "touch x")
        done = call("diff", cwd=evil)
        assert done.returncode == 125 and "\x1b" not in done.stderr
        assert not any(line.startswith("stockade: all is well") for line in done.stderr.splitlines())

    def test_as_json(self, project: Path, call: Call) -> None:
        found = [changed(project, "touch x") for _ in range(2)]
        done = call("commit", "--json")
        refused = json.loads(done.stdout)
        assert done.returncode == 125 and not refused["ok"] and not (project / "x").exists()
        assert all(one.id in refused["reason"] for one in found)


class TestShown:
    def test_the_one_that_diff_showed_last_is_committed(self, project: Path, call: Call) -> None:
        one, two = (changed(project, f"echo {name} > {name}") for name in ("one", "two"))
        call("diff", one.id)
        call("diff", two.id)
        call("diff", one.id, "one")
        assert call("commit").returncode == 0 and (project / "one").exists()
        assert not (project / "two").exists() and [left.id for left in Workspace.list()] == [two.id]

    def test_a_single_one_that_was_not_shown_is_refused(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        done = call("commit")
        assert done.returncode == 125 and "has not been shown yet" in done.stderr
        assert f"stockade commit {workspace.id}" in done.stderr and not (project / "new").exists()
        assert call("commit", "--unseen").returncode == 0 and (project / "new").exists()

    def test_of_more_than_a_diff_lists_is_made_in_parts(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(layer_walk, "MOST_ENTRIES", 3)
        monkeypatch.chdir(project)
        id = changed(project, "for i in 1 2 3 4 5; do echo > src/$i; done; echo > other").id
        assert cli.main(["diff", "--no-pager"]) == 0
        assert "the list of changes is cut" in capsys.readouterr().err
        for words in ((), (id,)):
            assert cli.main(["commit", *words]) == 125
            said = capsys.readouterr().err
            assert "more than 3 entries" in said and f"`stockade commit {id} PATH`" in said
            assert f"`stockade discard {id}`" in said and "unseen" not in said
        assert cli.main(["commit", id, "src/1", "other"]) == 0
        assert (project / "src/1").exists() and (project / "other").exists()
        assert not (project / "src/2").exists()

    def test_by_its_id_it_need_not_be_shown(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        assert call("commit", workspace.id).returncode == 0 and (project / "new").exists()

    @pytest.mark.parametrize("form", ["--stat", "--name-only", "-z", "--patch", "--json"])
    def test_in_whatever_form(self, project: Path, call: Call, form: str) -> None:
        changed(project, "touch new")
        call("diff", form)
        assert call("commit").returncode == 0 and (project / "new").exists()

    def test_two_terminals_do_not_speak_for_each_other(self, project: Path, call: Call) -> None:
        one, two = (changed(project, f"echo {name} > {name}") for name in ("one", "two"))
        call("diff", one.id)
        assert in_another_terminal("diff", two.id, cwd=project).returncode == 0
        assert call("commit").returncode == 0 and sorted(os.listdir(project)) == ["file", "one", "src"]

    def test_only_another_terminal_has_shown_one(self, project: Path, call: Call) -> None:
        changed(project, "touch new")
        in_another_terminal("diff", cwd=project)
        done = call("commit")
        assert done.returncode == 0 and "showed in another terminal" in done.stderr

    def test_other_terminals_have_shown_several(self, project: Path, call: Call) -> None:
        for name in ("one", "two"):
            in_another_terminal("diff", changed(project, f"touch {name}").id, cwd=project)
        done = call("commit")
        assert done.returncode == 125 and "there are 2 workspaces" in done.stderr

    def test_looking_makes_it_no_younger(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        for path in (workspace.layer, f"{workspace.layer}/upper"):
            os.utime(path, (1e9, 1e9))
        call("diff")
        assert workspace.changed == 1e9

    def test_a_damaged_note_counts_as_none(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        call("diff")
        Path(workspace.layer, "reviews").write_text("[{")
        assert call("commit").returncode == 125
        call("diff")
        assert call("commit").returncode == 0


class TestPaths:
    @pytest.fixture
    def made(self, project: Path) -> Workspace:
        return changed(project, "echo x > file; echo x > src/code; echo x > src/new; mkdir d; touch d/e")

    def test_count_from_where_you_are(self, made: Workspace, project: Path, call: Call) -> None:
        def names(*words: str, cwd: Path = project) -> list[str]:
            return call("diff", "--name-only", *words, cwd=cwd).stdout.split()

        assert names("file") == ["file"] and names("src") == ["src/code", "src/new"]
        assert names("new", cwd=project / "src") == ["src/new"]
        assert names(".", cwd=project / "src") == ["src/code", "src/new"]
        assert names("../file", "code", cwd=project / "src") == ["file", "src/code"]
        assert names(str(project / "d")) == ["d", "d/e"] and names("d/e") == ["d/e"]
        assert names(made.id, "new", cwd=project / "src") == ["src/new"]
        assert names("@", "./file") == ["file"] and names(".") == names()

    def test_that_begin_with_a_dash(self, project: Path, call: Call) -> None:
        made = changed(project, "echo x > -name; echo x > --stat; echo x > other")
        for words in (["--", "-name"], ["--", made.id, "-name"], [made.id, "--", "-name"]):
            assert call("diff", "--name-only", *words).stdout == "-name\n"
        call("diff")
        assert call("commit", "--", "-name").returncode == 0
        assert call("commit", made.id, "--json", "--", "--stat").returncode == 0
        assert sorted(path.name for path in project.iterdir()) == ["--stat", "-name", "file", "src"]

    def test_through_a_link_to_the_tree(
        self, made: Workspace, project: Path, call: Call, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(project)
        done = call("diff", "--name-only", f"{tmp_path}/link/src/new")
        assert done.stdout == "src/new\n"

    def test_are_committed(self, made: Workspace, project: Path, call: Call) -> None:
        call("diff")
        assert call("commit", "new", cwd=project / "src").stdout.startswith("1 change committed")
        assert (project / "src" / "new").exists() and (project / "file").read_text() == "old\n"
        assert call("commit", made.id, "../file", cwd=project / "src").returncode == 0
        assert (project / "file").read_text() == "x\n" and (project / "src" / "code").read_text() == "old\n"

    def test_that_are_forced(self, made: Workspace, project: Path, call: Call) -> None:
        (project / "src" / "code").write_text("mine\n")
        assert call("commit", made.id, "code", cwd=project / "src").returncode == 125
        assert call("commit", made.id, "code", "--force", "code", cwd=project / "src").returncode == 0
        assert (project / "src" / "code").read_text() == "x\n"

    @pytest.mark.parametrize("command", ["diff", "commit"])
    def test_outside_are_refused(self, made: Workspace, call: Call, command: str, tmp_path: Path) -> None:
        for words in (["../x"], ["/etc/passwd"], [made.id, ".."], [""]):
            done = call(command, *words)
            assert done.returncode == 125 and not done.stdout, words
        done = call(command, made.id, "file", cwd=tmp_path)
        assert done.returncode == 125 and f"write {made.path}/file" in done.stderr

    def test_that_nothing_has_are_refused(self, made: Workspace, call: Call) -> None:
        done = call("diff", "nothing")
        assert done.returncode == 125 and "neither a workspace nor a path" in done.stderr
        done = call("diff", made.id, "nothing")
        assert done.returncode == 125 and "has no 'nothing'" in done.stderr

    def test_that_did_not_change_have_no_changes(self, project: Path, call: Call) -> None:
        changed(project, "touch new")
        assert call("diff", "file").stdout == "no changes\n"

    def test_that_are_ids_too(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        (project / workspace.id[:4]).touch()
        for command in ("diff", "commit"):
            done = call(command, workspace.id[:4])
            assert (
                done.returncode == 125 and f"write @{workspace.id[:4]} or ./{workspace.id[:4]}" in done.stderr
            )
        assert call("diff", "--name-only", workspace.id[:5]).stdout == "new\n"
        assert call("diff", "--name-only", f"@{workspace.id[:4]}").stdout == "new\n"
        assert call("diff", f"./{workspace.id[:4]}").stdout == "no changes\n"

    def test_that_the_program_named_like_the_id(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        with workspace.files as files:
            files.write(f"{project}/{workspace.id}", b"evil")
        done = call("commit", workspace.id)
        assert done.returncode == 125 and f"write @{workspace.id}" in done.stderr
        assert call("commit", f"@{workspace.id}").returncode == 0

    def test_a_mistyped_one_is_no_id(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch new")
        for word in (workspace.id[0], workspace.id[:3]):
            done = call("commit", word)
            assert done.returncode == 125 and "4 characters" in done.stderr and not (project / "new").exists()
        assert call("commit", workspace.id[:4]).returncode == 0


def test_an_empty_word_is_no_id(project: Path, call: Call) -> None:
    changed(project, "touch new")
    for command in ("diff", "commit", "discard", "snapshot", "fork"):
        assert call(command, "").returncode == 125
    assert len(Workspace.list()) == 1


class TestDiscard:
    """It is for whole workspaces: what else a word can mean is refused before anything is forgotten."""

    @pytest.mark.parametrize(
        ("word", "why"),
        [
            ("src/code", "'src/code' is a path, but discard takes only whole workspaces"),
            ("file", "'file' is a path, but discard takes only whole workspaces"),
            (".", "'.' is a path, but discard takes only whole workspaces"),
            ("nothing", "'nothing' is neither a workspace nor a path here"),
            ("@nothing", "there is no workspace 'nothing'"),
        ],
    )
    def test_looks_every_word_up_first(self, project: Path, call: Call, word: str, why: str) -> None:
        kept = changed(project, "echo x > here")
        for words in ([kept.id, word], [word, kept.id], [word]):
            done = call("discard", *words)
            assert done.returncode == 125 and not done.stdout and why in done.stderr
            assert [one.id for one in Workspace.list()] == [kept.id]

    def test_takes_no_word_that_is_also_a_path(self, project: Path, call: Call) -> None:
        kept = changed(project, "echo x > here")
        (project / kept.id[:5]).mkdir()
        done = call("discard", kept.id[:5])
        assert done.returncode == 125 and f"write @{kept.id[:5]} or ./{kept.id[:5]}" in done.stderr
        assert call("discard", f"@{kept.id[:5]}", kept.id).returncode == 0

    def test_is_silent_if_asked(self, project: Path, call: Call) -> None:
        kept = changed(project, "echo x > here")
        done = call("discard", "-q", kept.id)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "line",
    ["diff {}", "commit {}", "discard {}", "snapshot {}", "restore {} x", "fork {}", "merge {} {}",
     "run -w @{} -- true", "logs {}"],
)  # fmt: skip
def test_an_id_can_be_shortened_to_four_characters_everywhere(project: Path, call: Call, line: str) -> None:
    kept = changed(project, "echo x > here")
    for short in (kept.id[:1], kept.id[:3], f"@{kept.id[:3]}".lstrip("@" if "@" in line else "")):
        done = call(*line.replace("{}", short).split())
        assert done.returncode == 125 and "4 characters" in done.stderr, done.stderr
    done = call(*line.replace("{}", kept.id[:4]).split())
    assert "4 characters" not in done.stderr, done.stderr
