"""What `deny` means: names and patterns count from the workspace, wherever they are written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import IS_ROOT
from stockade import Policy, PolicyError, Pool, Sandbox, Workspace
from stockade.errors import NotFoundError
from support.means import applies
from support.screen import STOCKADE

SECRET = "the secret\n"
SECRETS = (".env", "server.pem", "certs/a.pem", "certs/deep/b.pem", "sub/.env")
OPEN = ("README", "certs/notes", "sub/app.py")
FIND = ["find", ".", "-type", "f"]


@pytest.fixture
def project(workspace: Path) -> Path:
    for name in (*SECRETS, *OPEN):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(SECRET if name in SECRETS else "open\n")
    return workspace


def listed(policy: Policy, **options: Any) -> set[str]:
    result = stockade.run(FIND, policy, on_exit="discard", **options).check()
    return {line.removeprefix("./") for line in result.text.split()}


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(project: Path, tmp_path: Path) -> Call:
    """`stockade WORDS` in the project, by a user whose home is beside it."""

    def call(*words: str, cwd: Path = project) -> subprocess.CompletedProcess[str]:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        environ = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        return subprocess.run(
            [STOCKADE, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    return call


def files_of(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    return {line.removeprefix("./") for line in done.stdout.split()}


ALL = {*SECRETS, *OPEN}


def written_in(call: Call, place: Path, text: str) -> set[str]:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return files_of(
        call("run", "--discard", *([] if place.name == "config.toml" else ["-p", str(place)]), "--", *FIND)
    )


@pytest.mark.parametrize("place", ["home/d.toml", "home/config/stockade/config.toml"])
def test_a_policy_of_another_directory_hides_the_names_in_the_workspace(
    call: Call, tmp_path: Path, place: str
) -> None:
    assert files_of(call("run", "--discard", "--", *FIND)) == ALL, "the control: nothing is denied"
    found = written_in(call, tmp_path / place, 'deny = [".env", "./sub/.env"]\n')
    assert found == ALL - {".env", "sub/.env"}


@pytest.mark.parametrize("place", ["home/d.toml", "home/config/stockade/config.toml"])
def test_a_pattern_of_another_directory_hides_what_matches_in_the_workspace(
    call: Call, tmp_path: Path, place: str
) -> None:
    found = written_in(call, tmp_path / place, 'deny = ["**/.env", "**/*.pem"]\n')
    assert found == set(OPEN)


def test_flags_and_layers_count_from_the_workspace_too(call: Call, project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = call(
        "run",
        "--discard",
        "-w",
        str(project),
        "--deny",
        ".env",
        "--deny",
        "**/*.pem",
        "--",
        *FIND,
        cwd=elsewhere,
    )
    assert files_of(done) == {*OPEN, "sub/.env"}
    layers = tmp_path / "home/config/stockade/policies.toml"
    layers.parent.mkdir(parents=True)
    layers.write_text('[agent.linter]\ndeny = [".env"]\n\n[ceiling]\nprofile = "dev"\n'
                      f'workspace = "{project}"\ndeny = ["**/*.pem"]\n')  # fmt: skip
    assert files_of(call("run", "--discard", "--agent", "linter", "--", *FIND)) == {*OPEN, "sub/.env"}
    assert files_of(call("run", "--discard", "--", *FIND)) == {*OPEN, ".env", "sub/.env"}


PATTERNS = {
    "*.pem": {"server.pem"},
    "./*.pem": {"server.pem"},
    "**/*.pem": {"server.pem", "certs/a.pem", "certs/deep/b.pem"},
    "certs/**/*.pem": {"certs/a.pem", "certs/deep/b.pem"},
    "certs/*": {"certs/a.pem", "certs/deep/b.pem", "certs/notes"},
    "certs/**": {"certs/a.pem", "certs/deep/b.pem", "certs/notes"},
    "*/.env": {"sub/.env"},
    "**/.env": {".env", "sub/.env"},
    "**/deep": {"certs/deep/b.pem"},
    "**/deep/*.pem": {"certs/deep/b.pem"},
    "s*.p*m": {"server.pem"},
    "{project}/c*/*/*.pem": {"certs/deep/b.pem"},
    "**/**/b.*": {"certs/deep/b.pem"},
    "*.none?": set(),
    "none/**/*.pem?": set(),
}


@pytest.mark.parametrize("mode", ["overlay", "ro"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_hides_what_matches(project: Path, pattern: str, mode: str) -> None:
    pattern, hidden = pattern.replace("{project}", str(project)), PATTERNS[pattern]
    policy = Policy(workspace={"path": str(project), "mode": mode}, deny=[pattern])
    assert listed(policy) == ALL - hidden


def test_patterns_reach_into_grants_by_their_full_path(project: Path) -> None:
    policy = Policy(read=[str(project)], deny=[f"{project}/**/*.pem"])
    result = stockade.run(["find", str(project), "-type", "f"], policy)
    assert {os.path.relpath(line, project) for line in result.text.split()} == {*OPEN, ".env", "sub/.env"}
    assert result.matched == {f"{project}/**/*.pem": 3}
    with pytest.raises(PolicyError, match="matches nothing that is visible"):
        stockade.run(["true"], Policy(read=[str(project / "sub")], deny=[f"{project}/**/*.pem"]))
    # A file that is granted by itself, and a directory that a pattern takes away as a whole.
    alone = Policy(read=[str(project / "server.pem"), str(project / "certs")], deny=[f"{project}/*e*"])
    assert stockade.run(["ls", "-A", str(project)], alone).exit_code != 0


def test_patterns_reach_into_the_systems_trees(project: Path) -> None:
    result = stockade.run(["ls", "/usr/bin"], Policy(deny=["/usr/bin/*zip*", "/bin/ba*sh"]))
    names = result.text.split()
    assert len(names) > 50 and not [name for name in names if "zip" in name or name == "bash"]


def test_the_result_the_plan_and_verbose_say_how_many_matched(call: Call, project: Path) -> None:
    result = stockade.run(["true"], Policy(workspace=str(project), deny=[".env", "**/*.pem", "*.none?"]))
    assert result.matched == {"**/*.pem": 3, "*.none?": 0}
    said = 'deny = "**/*.pem" matched 3 paths at the start, later ones are not hidden'
    assert said in result.controls["deny"].observed
    assert said in call("run", "-v", "--deny", "**/*.pem", "--", "true").stderr
    plan = call("plan", "--deny", "**/*.pem", "--", "true").stdout
    assert said in plan and f"hide {project}/certs/a.pem" in " ".join(plan.split())


def test_what_matches_later_is_shown_and_a_plain_name_is_not(project: Path) -> None:
    """As NP-32 says: a pattern is met with the files at the start, a name is hidden for good."""
    with Sandbox(Policy(workspace=str(project), deny=["**/*.pem", "later"]), on_exit="discard") as box:
        for name in ("later.pem", "later"):
            (project / name).write_text("new\n")
        assert box.run(["cat", "later.pem"]).text == "new\n"
        assert box.run(["cat", "later"]).exit_code == 1
        # What matched is hidden by its name, whatever the host puts there.
        (project / "server.pem").unlink()
        assert box.run(["cat", "server.pem"]).exit_code == 1
        (project / "server.pem").write_text(SECRET)
        assert box.run(["cat", "server.pem"]).exit_code == 1


@pytest.mark.parametrize("pattern", ["*.key", "**/*.key", "none/*", "/none/*.key", "~/*.key"])
def test_a_pattern_that_matches_nothing_is_an_error(project: Path, pattern: str) -> None:
    with pytest.raises(PolicyError, match="matches nothing that is visible") as caught:
        stockade.run(["true"], Policy(workspace=str(project), deny=[pattern]))
    assert f'"{pattern}?"' in caught.value.hint
    assert ('"**/*.key" for any depth' in caught.value.hint) == (pattern == "*.key")
    assert stockade.run(["true"], Policy(workspace=str(project), deny=[f"{pattern}?"])).ok


def test_a_name_outside_of_what_is_shown_is_no_error(project: Path, hidden: Path) -> None:
    policy = Policy(workspace=str(project), deny=[str(hidden), "~/.ssh", "none", "none/below"])
    assert listed(policy) == ALL


def test_without_a_workspace_what_counts_from_it_hides_nothing_and_that_is_said() -> None:
    result = stockade.run(["true"], Policy(deny=[".env", "**/*.pem"]))
    assert result.ok and result.matched == {}
    assert "hides nothing, because there is no workspace" in result.controls["deny"].observed


ODD = ["a*b.pem", "a[b].pem", "a?.pem", "{x,y}.pem", "new\nline.pem", "$HOME.pem", "x" * 251 + ".pem"]
ODD += [os.fsdecode(b"\xff\xfe.pem")]


def test_odd_names_that_a_pattern_matches_are_hidden(workspace: Path) -> None:
    for name in ODD:
        (workspace / name).write_text(SECRET)
    policy = Policy(workspace=str(workspace), deny=["*.pem"])
    assert stockade.run(["ls", "-A"], policy).text == ""
    # Also where a policy has been written down by real names in between, as for a project.
    parent = Policy(workspace=str(workspace), deny=["*.pem"], delegate=True)
    assert stockade.run(["ls", "-A"], parent).text == ""


@pytest.mark.parametrize(
    ("name", "written"),
    [("a*b", "a[*]b"), ("a?", "a[?]"), ("[id]", "[[]id]"), ("{a,b}", "[{]a,b}"), ("a$b", "a$$b")],
)
def test_a_name_with_a_wildcard_in_it_is_written_in_brackets(
    workspace: Path, name: str, written: str
) -> None:
    for file in (name, "axb", "ab"):
        (workspace / file).write_text(SECRET)
    policy = Policy(workspace=str(workspace), deny=[written])
    assert set(stockade.run(["ls", "-A"], policy).text.split()) == {"axb", "ab"}


def test_a_workspace_whose_own_path_has_wildcards_in_it(tmp_path: Path) -> None:
    place, other = tmp_path / "a*[b]{c,d}", tmp_path / "aXb{c,d}"
    for directory in (place, other):
        directory.mkdir()
        (directory / "k.pem").write_text(SECRET)
        (directory / ".env").write_text(SECRET)
    for deny in (["*.pem", ".env"], ["$PLACE/*.pem", "$PLACE/.env"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PLACE", str(place))
            policy = Policy(workspace=str(place), read=[str(other)], deny=deny)
            assert stockade.run(["ls", "-A", ".", str(other)], policy).text.split() == [
                ".:", f"{other}:", ".env", "k.pem",
            ]  # fmt: skip


def test_a_project_in_a_directory_with_wildcards_in_its_name(call: Call, tmp_path: Path) -> None:
    """Its policy is compared and pinned by real names, which must not become patterns."""
    place = tmp_path / "$a*[b]{c,d}?"
    for name in ("sub/k.pem", ".env", "kept", "sub/kept"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(SECRET)
    (place / "sub/what?.pem").symlink_to("a*b")
    (place / "sub/a*b").write_text(SECRET)
    (place / "stockade.toml").write_text('deny = [".env", "**/*.pem"]\n')
    assert files_of(call("run", "--discard", "--", *FIND, cwd=place)) == {"kept", "sub/kept", "stockade.toml"}


def test_patterns_without_end_are_refused(workspace: Path) -> None:
    with pytest.raises(PolicyError, match="more than 5000"):
        stockade.run(["true"], Policy(workspace=str(workspace), deny=[f"a/{n}/*?" for n in range(5000)]))


class TestLinks:
    """What matches may be a link, and so may what is on the way."""

    def test_a_link_that_matches_is_hidden_with_what_it_leads_to(self, project: Path) -> None:
        (project / "real").write_text(SECRET)
        (project / "link.key").symlink_to("middle")
        (project / "middle").symlink_to("real")
        assert listed(Policy(workspace=str(project), deny=["*.key"])) == ALL
        assert stockade.run(["ls"], Policy(workspace=str(project), deny=["*.key"])).text.split() == [
            "README", "certs", "server.pem", "sub",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "target", ["/usr", "/", "/etc", "/dev/null", "/proc/self", ".", "..", "loop.key"]
    )
    def test_a_link_that_matches_hides_nothing_else(self, project: Path, target: str) -> None:
        """A repository could else take away the system, or keep every run from starting."""
        (project / "loop.key").symlink_to(target)
        assert listed(Policy(workspace=str(project), deny=["*.key"])) == ALL

    def test_a_name_that_is_a_link_to_a_device_is_hidden(self, project: Path) -> None:
        (project / "masked").symlink_to("/dev/null")
        assert "masked" not in stockade.run(["ls"], Policy(workspace=str(project), deny=["masked"])).text

    def test_the_walk_follows_no_link(self, project: Path, hidden: Path) -> None:
        (hidden / "x.key").write_text(SECRET)
        (project / "way").symlink_to(hidden)
        (project / "round").symlink_to(".")
        for pattern in ("**/*.key", "*/*.key"):
            with pytest.raises(PolicyError, match="matches nothing that is visible"):
                stockade.run(["true"], Policy(workspace=str(project), deny=[pattern]))

    def test_a_link_at_the_beginning_is_followed_once(self, project: Path) -> None:
        (project / "current").symlink_to("certs")
        assert listed(Policy(workspace=str(project), deny=["current/*.pem"])) == ALL - {"certs/a.pem"}


class TestOtherWays:
    """Whoever starts something in the same sandbox, or goes on with it, sees no more."""

    def test_files_from_outside(self, project: Path) -> None:
        with Sandbox(Policy(workspace=str(project), deny=["**/*.pem", ".env"])) as box:
            found = {file.path for file in box.files.search("**")} | {
                file.path for file in box.files.list(str(project))
            }
            assert not [path for path in found if path.endswith((".pem", "/.env")) and "sub" not in path]
            for name in ("server.pem", "certs/a.pem", ".env"):
                with pytest.raises(NotFoundError):
                    box.files.read(name)

    @pytest.mark.parametrize("mode", ["overlay", "ro"])
    def test_pools(self, project: Path, mode: str) -> None:
        policy = Policy(workspace={"path": str(project), "mode": mode}, deny=["**/*.pem", "**/.env"])
        with Pool(policy, size=2) as pool:
            for _ in range(3):
                found = pool.run(FIND)
                assert {line.removeprefix("./") for line in found.text.split()} == set(OPEN)

    def test_a_resumed_workspace_and_its_forks(self, project: Path) -> None:
        policy = Policy(workspace=str(project), deny=["**/*.pem", "**/.env"])
        first = stockade.run(["sh", "-c", "echo new > made"], policy)
        workspace = Workspace.open(first.workspace_id)
        for one in (workspace, *workspace.fork(1)):
            assert listed(policy, resume=one) == {*OPEN, "made"}

    def test_what_an_earlier_run_copied_cannot_be_hidden_by_a_pattern(self, project: Path) -> None:
        first = stockade.run(["sh", "-c", "cp server.pem certs/copy.pem"], Policy(workspace=str(project)))
        with pytest.raises(PolicyError, match=r"an earlier run .* made or changed .*/certs/copy\.pem"):
            stockade.run(["true"], Policy(deny=["**/*.pem"]), resume=Workspace.open(first.workspace_id))

    def test_what_a_program_makes_by_a_name_that_matched_is_held_back(self, project: Path) -> None:
        result = stockade.run(
            ["sh", "-c", "echo mine > server.pem; echo mine > other"],
            Policy(workspace=str(project), deny=["*.pem"]),
        )
        done = Workspace.open(result.workspace_id).commit()
        assert [held.path for held in done.held] == ["server.pem"]
        assert (project / "server.pem").read_text() == SECRET


class TestEarlierPolicies:
    """A relative name counted from the directory of its file: what such a policy hid is still hidden."""

    def test_a_project_file_above_the_directory_that_is_worked_in(self, call: Call, project: Path) -> None:
        (project / "stockade.toml").write_text('deny = ["sub/.env"]\n')
        assert files_of(call("run", "--discard", "--", *FIND, cwd=project / "sub")) == {"app.py"}

    def test_a_grant_beside_the_policy_file(self, call: Call, tmp_path: Path) -> None:
        data = tmp_path / "data"
        data.mkdir()
        for name in ("key", "open"):
            (data / name).write_text(SECRET)
        (tmp_path / "d.toml").write_text('read = ["./data"]\ndeny = ["data/key"]\n')
        assert call("run", "-p", str(tmp_path / "d.toml"), "--", "ls", str(data)).stdout == "open\n"

    def test_a_policy_file_above_the_workspace_does_not_hide_the_workspace(
        self, call: Call, project: Path
    ) -> None:
        (project.parent / "d.toml").write_text(f'deny = ["{project.name}"]\n')
        assert files_of(call("run", "--discard", "-p", str(project.parent / "d.toml"), "--", *FIND)) == ALL

    def test_a_path_that_leads_out_of_the_workspace_is_refused_with_the_fix(
        self, call: Call, project: Path
    ) -> None:
        (project / "ci").mkdir()
        (project / "ci/policy.toml").write_text('workspace = ".."\ndeny = ["../.env"]\n')
        done = call("run", "-p", "ci/policy.toml", "--", "true")
        assert done.returncode == 125 and "ci/policy.toml:2: " in done.stderr
        assert "is relative to the workspace, and leads out of it" in done.stderr


def test_a_trusted_project_that_works_elsewhere_shows_nothing_that_the_user_hides(
    call: Call, project: Path, tmp_path: Path
) -> None:
    own = tmp_path / "home/config/stockade/config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('deny = [".env", "*.pem?"]\n')
    (project / "sub/stockade.toml").write_text('workspace = ".."\n')
    (project / "sub/x.pem").write_text(SECRET)
    done = call("run", "--discard", "--", *FIND, cwd=project / "sub")
    assert done.returncode == 125 and "asks for more" in done.stderr
    assert call("trust", "stockade.toml", cwd=project / "sub").returncode == 0
    found = files_of(call("run", "--discard", "--cwd", "..", "--", *FIND, cwd=project / "sub"))
    assert found == {*OPEN, "certs/a.pem", "certs/deep/b.pem", "sub/stockade.toml"}


def test_a_project_that_works_in_a_part_of_the_workspace_asks_for_no_more(
    call: Call, project: Path, tmp_path: Path
) -> None:
    own = tmp_path / "home/config/stockade/config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('deny = ["**/.env", "*.pem?"]\n')
    (project / "stockade.toml").write_text('workspace = "sub"\n')
    assert files_of(call("run", "--discard", "--", *FIND)) == {"app.py"}


class TestHostileTrees:
    """The walk is bounded, and whatever does not fit is refused."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stockade.resolve.paths import hidden_paths

        monkeypatch.setattr(hidden_paths, "MOST_ENTRIES", 500)
        monkeypatch.setattr(hidden_paths, "MOST_NAMES", 50)

    def refused(self, workspace: Path, *deny: str) -> str:
        with pytest.raises(PolicyError) as caught:
            stockade.run(["true"], Policy(workspace=str(workspace), deny=deny))
        return caught.value.message

    def test_too_many_names_to_look_at(self, workspace: Path) -> None:
        for number in range(501):
            (workspace / f"{number}").touch()
        assert "more than 500 names" in self.refused(workspace, "**/*.pem?")
        # Names are looked up, not looked for; and a tree that is denied as a whole is not looked into.
        assert stockade.run(["true"], Policy(workspace=str(workspace), deny=["none/*?", "0"])).ok
        (workspace / "large").mkdir()
        for path in workspace.glob("[0-9]*"):
            path.rename(workspace / "large" / path.name)
        assert stockade.run(["true"], Policy(workspace=str(workspace), deny=["large", "**/*.pem?"])).ok

    def test_too_many_matches(self, workspace: Path) -> None:
        for number in range(51):
            (workspace / f"{number}.pem").touch()
        assert "51 paths, more than 50" in self.refused(workspace, "*.pem")

    def test_too_deep(self, workspace: Path) -> None:
        here = os.open(workspace, os.O_RDONLY)
        for _ in range(260):
            os.mkdir("d", dir_fd=here)
            here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
            os.close(above)
        os.close(here)
        assert "256 deep" in self.refused(workspace, "**/*.pem?")

    def test_longer_than_a_name_can_be(self, workspace: Path) -> None:
        here = os.open(workspace, os.O_RDONLY)
        for _ in range(17):
            os.mkdir("d" * 255, dir_fd=here)
            here, above = os.open("d" * 255, os.O_RDONLY, dir_fd=here), here
            os.close(above)
        os.close(os.open("x.pem", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        os.close(here)
        assert "too long for a plan" in self.refused(workspace, "**/*.pem")

    def test_a_pattern_and_a_name_that_would_take_for_ever(self, workspace: Path) -> None:
        (workspace / ("a" * 255)).touch()
        assert "matches nothing that is visible" in self.refused(
            workspace, "*a" * 60 + "b", "**/" * 200 + "*b"
        )

    @pytest.mark.parametrize("mode", [0o000, 0o300, 0o100, 0o400])
    def test_a_directory_that_cannot_be_looked_into(self, workspace: Path, mode: int) -> None:
        """The program could guess a name in it, or open it to itself in its copy."""
        applies(not IS_ROOT, "root looks into everything")
        (workspace / "shut").mkdir()
        (workspace / "shut/x.pem").write_text(SECRET)
        (workspace / "shut/inner").mkdir()
        (workspace / "shut").chmod(mode)
        try:
            if mode == 0o400:
                assert "may not list" in self.refused(workspace, "*/inner/x.pem")
            else:
                assert "may not list" in self.refused(workspace, "**/*.pem")
                # Denied by its name it is no matter.
                assert stockade.run(["true"], Policy(workspace=str(workspace), deny=["shut", "**/*.pem?"])).ok
        finally:
            (workspace / "shut").chmod(0o700)


def test_what_matches_in_a_tree_that_is_writable_for_real_is_refused(project: Path) -> None:
    policy = {"workspace": {"path": str(project), "mode": "rw"}, "protect": []}
    with pytest.raises(PolicyError, match=r'deny = "\*\*/\*\.pem": .* writable for real'):
        stockade.run(["true"], Policy(**policy, deny=["**/*.pem"]))
    assert stockade.run(["true"], Policy(**policy, deny=["**/*.none?"])).ok
    with pytest.raises(PolicyError, match="contains the workspace"):
        stockade.run(["true"], Policy(workspace=str(project), deny=[f"{project.parent}/*"]))
