"""Where policies meet files: what is opened, what is refused, and that nothing stays open."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade import state
from stockade.errors import PolicyError, SetupError
from stockade.linux.user import Caller
from stockade.policy import Limits, Policy
from stockade.resolve.resolution import resolve, unfit
from stockade.resolve.resolved import ResolvedPolicy


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    return Caller(
        uid=os.getuid(),
        gid=os.getgid(),
        user="me",
        group="us",
        home=str(home),
        cwd=str(home / "project"),
        environ={
            "TERM": "xterm",
            "SECRET": "s",
            "DATA": str(tmp_path / "data"),
            "WORD": "word",
            "LANG": "de_DE",
        },
    )


Resolve = Callable[..., ResolvedPolicy]


@pytest.fixture
def resolved(caller: Caller, stockade_home: Path) -> Iterator[Resolve]:
    made: list[ResolvedPolicy] = []

    def make(pinned: bool = False, **clauses: Any) -> ResolvedPolicy:
        made.append(resolve(Policy(**clauses), caller, str(stockade_home), pinned=pinned))
        return made[-1]

    yield make
    for one in made:
        one.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_grant_is_opened_by_its_real_name(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    found = resolved(read=[str(tmp_path / "link")]).grants
    assert [(grant.path, grant.access, grant.is_dir) for grant in found] == [
        (f"{tmp_path}/data", "read", True)
    ]
    assert found[0].clause == f'read = "{tmp_path}/link"'
    assert os.readlink(f"/proc/self/fd/{found[0].fd}") == f"{tmp_path}/data"
    assert not os.get_inheritable(found[0].fd)


def test_paths_are_expanded_for_the_caller(resolved: Resolve, tmp_path: Path) -> None:
    for name in ("home/x", "data/y", "home/project/word", "home/project/$z"):
        (tmp_path / name).mkdir(parents=True)
    found = resolved(read=["~/x", "$DATA/y", "${DATA}", "./$WORD", "$$z"])
    names = ["data", "data/y", "home/project/$z", "home/project/word", "home/x"]
    assert [grant.path for grant in found.grants] == [f"{tmp_path}/{name}" for name in names]


def test_a_variable_that_is_unset_or_relative_is_refused(resolved: Resolve) -> None:
    with pytest.raises(PolicyError, match="NOPE is not set"):
        resolved(read=["$NOPE/x"])
    with pytest.raises(PolicyError, match="WORD is not an absolute path"):
        resolved(read=["$WORD/x"])


def test_grants_are_sorted_unique_and_the_writable_one_wins(resolved: Resolve, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    b, a = str(tmp_path / "b"), str(tmp_path / "a")
    found = resolved(read=[b, a, f"{b}/"], write=[a]).grants
    assert [(grant.path, grant.access) for grant in found] == [(a, "write"), (b, "read")]


def test_an_optional_path_may_be_missing(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert resolved(read=[f"{tmp_path}/none?", f"{tmp_path}/file/below?", "~/none?"]).grants == ()
    assert len(resolved(read=[f"{tmp_path}/file?"]).grants) == 1


def test_a_missing_path_is_refused_with_what_exists_of_it(resolved: Resolve, tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        resolved(read=[f"{tmp_path}/no/where"])
    assert f"{tmp_path}/no/where does not exist" in caught.value.message
    assert f"{tmp_path} exists" in caught.value.hint
    assert f'"{tmp_path}/no/where?"' in caught.value.hint


def test_what_is_denied_is_known_by_its_real_names(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "way").symlink_to("data")
    (tmp_path / "data" / "loop").symlink_to("loop")
    (tmp_path / "data" / "here").symlink_to("in/.")
    found = resolved(
        deny=["$DATA/in/x", "$DATA/in", f"{tmp_path}/way/y", "$DATA/loop", "$DATA/here", "~/none"]
    )
    names = ["data/here", "data/in", "data/loop", "data/y", "home/none"]
    assert list(found.denied) == [f"{tmp_path}/{name}" for name in names]


def test_a_grant_in_what_is_denied_is_left_out_and_closed(resolved: Resolve, tmp_path: Path) -> None:
    for name in ("data/in", "database"):
        (tmp_path / name).mkdir(parents=True)
    before = descriptors()
    found = resolved(read=["$DATA/in", f"{tmp_path}/database"], write=["$DATA"], deny=["$DATA"])
    assert [grant.path for grant in found.grants] == [f"{tmp_path}/database"]
    found.close()
    assert descriptors() == before


def test_programs_are_found_by_pattern(resolved: Resolve, tmp_path: Path) -> None:
    tools = tmp_path / "data"
    for name in ("one", "two.sh", "sub/three", "sub/deep/four"):
        (tools / name).parent.mkdir(parents=True, exist_ok=True)
        (tools / name).write_text("")
        (tools / name).chmod(0o755)
    (tools / "plain").write_text("")
    (tools / "out").symlink_to("/bin/sh")
    sh = os.path.realpath("/bin/sh")

    def found(pattern: str) -> tuple[list[str], list[str]]:
        programs = resolved(exec=[pattern]).programs
        assert programs is not None
        (names,) = programs.values()
        return sorted(f.removeprefix(f"{tools}/") for f in names.files), [
            t.removeprefix(f"{tools}") for t in names.trees
        ]

    assert found("$DATA/one") == (["one"], [])
    assert found("$DATA/*") == (sorted(["one", "two.sh", sh]), [])
    assert found("$DATA/?w*.s?*") == (["two.sh"], [])
    assert found("$DATA/sub/deep/*") == ([], ["/sub/deep"])
    assert found("$DATA/**") == ([sh], [""])
    assert found("$DATA/**/f*") == (["sub/deep/four"], [])
    assert found("$DATA/out") == ([sh], [])
    assert resolved(exec=["/bin/sh", "$DATA/none?"]).programs == resolved(exec=["/bin/sh"]).programs
    for pattern in ("$DATA/none", "$DATA/plain", "$DATA/p*", "$DATA/sub"):
        with pytest.raises(PolicyError, match="there is no such program") as caught:
            resolved(exec=[pattern])
        assert f'write "{pattern}?" if it may be missing' in caught.value.hint


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"read": ["/"]}, "the whole file system"),
    ({"exec": ["/"]}, "the whole file system"),
    ({"exec": ["/**"]}, "the whole file system"),
    ({"exec": ["/**/x"]}, "the whole file system"),
    ({"deny": ["/"]}, "no program could run"),
    ({"deny": ["/proc/self"]}, "/proc of its own"),
    ({"write": ["/"]}, "the whole file system"),
    ({"read": ["/proc"]}, "the sandbox has a /proc of its own"),
    ({"read": ["/proc/self/fd"]}, "/proc of its own"),
    ({"read": ["/sys/kernel"]}, "/sys of its own"),
    ({"read": ["/dev/null"]}, "a device"),
    ({"read": ["/dev"]}, "/dev of its own"),
    ({"write": ["/etc"]}, "/etc belongs to the system"),
    ({"write": ["/etc/passwd"]}, "/etc belongs to the system"),
    ({"write": ["/usr/local"]}, "/usr belongs to the system"),
    ({"write": ["/bin"]}, "belongs to the system"),
    ({"write": ["~"]}, "contains your whole home"),
    ({"write": ["~/.."]}, "after a name"),
    ({"workspace": "/"}, "the root"),
    ({"workspace": "~"}, "your home"),
    ({"workspace": {"path": "~", "mode": "ro"}}, "your home"),
    ({"workspace": ".."}, "your home"),
    ({"workspace": "../.."}, "above your home"),
    ({"workspace": "/usr/bin"}, "a system directory"),
    ({"workspace": "/etc"}, "a system directory"),
    ({"workspace": "none"}, "does not exist"),
    ({"workspace": "file"}, "is not a directory"),
    ({"read": ["fifo"]}, "a pipe"),
    ({"read": ["socket"]}, "a socket"),
    ({"read": ["loop"]}, "cannot open"),
    ({"read": ["x" * 300]}, "cannot open"),
    ({"read": ["$STATE"]}, "Stockade's own state"),
    ({"read": ["$STATE/below"]}, "Stockade's own state"),
    ({"read": ["$ABOVE_STATE"]}, "Stockade's own state"),
    ({"workspace": "$ABOVE_STATE"}, "home"),
    ({"write": ["~/.config/stockade"]}, "your own policy"),
    ({"write": ["~/.config"]}, "your own policy"),
    ({"write": ["."], "workspace": "."}, "is also the workspace"),
]


@pytest.mark.parametrize(("clauses", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_no_policy_may_grant_is_refused_and_closed(
    clauses: dict[str, Any], reason: str, caller: Caller, stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stockade_home / "below").mkdir(parents=True)
    (Path(caller.home) / ".config" / "stockade").mkdir(parents=True)
    project = Path(caller.cwd)
    (project / "file").write_text("")
    (project / "loop").symlink_to("loop")
    os.mkfifo(project / "fifo")
    monkeypatch.chdir(project)  # a socket's address must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    places = {"STATE": str(stockade_home), "ABOVE_STATE": str(stockade_home.parent)}
    caller = msgspec.structs.replace(caller, environ={**caller.environ, **places})
    before = descriptors()
    with pytest.raises(PolicyError, match=reason):
        resolve(Policy(**clauses), caller, str(stockade_home))
    assert descriptors() == before


def test_links_cannot_smuggle_a_refused_path_in(resolved: Resolve, caller: Caller) -> None:
    (Path(caller.cwd) / "innocent").symlink_to("/")
    (Path(caller.cwd) / "system").symlink_to("/usr/local")
    with pytest.raises(PolicyError, match="the whole file system"):
        resolved(read=["innocent"])
    with pytest.raises(PolicyError, match="/usr belongs to the system"):
        resolved(write=["system"])


def test_a_path_that_is_swapped_during_the_lookup_is_refused(
    resolved: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").mkdir()
    (tmp_path / "way").symlink_to("tree")
    really = os.open

    def swapping(path: str, flags: int, **options: Any) -> int:
        found = really(path, flags, **options)
        if path == "data":
            (tmp_path / "tree").rename(tmp_path / "gone")
            (tmp_path / "tree").symlink_to("other")
        return found

    monkeypatch.setattr(os, "open", swapping)
    with pytest.raises(PolicyError, match="replaced"):
        resolved(read=[f"{tmp_path}/way/data"])


def test_a_pinned_path_that_became_a_link_is_refused(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert resolved(pinned=True, read=[f"{tmp_path}/data"]).grants
    with pytest.raises(PolicyError, match="replaced"):
        resolved(pinned=True, read=[f"{tmp_path}/link"])
    with pytest.raises(PolicyError, match="replaced"):
        resolved(pinned=True, workspace=f"{tmp_path}/link")


@pytest.mark.parametrize(("mode", "access"), [("ro", "read"), ("rw", "write"), ("overlay", "overlay")])
def test_the_workspace_is_a_grant_by_its_mode(
    resolved: Resolve, caller: Caller, mode: str, access: str
) -> None:
    found = resolved(workspace={"path": ".", "mode": mode})
    assert found.workspace is not None
    assert (found.workspace.path, found.workspace.access) == (caller.cwd, access)
    assert found.grants == ()


def test_a_grant_of_the_workspace_itself_changes_nothing(resolved: Resolve) -> None:
    assert resolved(workspace=".", read=["."]).grants == ()
    assert resolved(workspace={"mode": "rw"}, write=["."]).grants == ()


def test_protected_paths_are_looked_up_in_the_workspace(resolved: Resolve, caller: Caller) -> None:
    (Path(caller.cwd) / ".git" / "hooks").mkdir(parents=True)
    (Path(caller.cwd) / ".envrc").symlink_to("nowhere")
    found = resolved(workspace=".", protect=[".git/hooks", ".git/config", ".envrc"])
    assert found.protected == ((".git/hooks", True), (".git/config", False), (".envrc", True))
    assert resolved().protected == ()


def test_the_environment_holds_what_was_passed_and_nothing_else(resolved: Resolve, caller: Caller) -> None:
    plain = resolved().environ
    assert set(plain) == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TERM"}
    assert (plain["HOME"], plain["USER"], plain["LANG"]) == (caller.home, "me", "de_DE")
    asked = resolved(pass_env=["SECRET", "UNSET", "TERM"], env={"TERM": "dumb", "CI": "1"}).environ
    assert (asked["SECRET"], asked["TERM"], asked["CI"]) == ("s", "dumb", "1")
    assert "UNSET" not in asked


def test_limits_are_the_profiles_where_none_are_written(resolved: Resolve) -> None:
    assert resolved().limits == Limits(tasks=256, output="10M", files=1024)
    assert resolved(limits={"wall": 3, "tasks": 9}).limits == Limits(
        tasks=9, wall=3, output="10M", files=1024
    )


def test_the_dev_profile_grants_the_toolchains_that_exist(resolved: Resolve, caller: Caller) -> None:
    (Path(caller.home) / ".pyenv").mkdir()
    (Path(caller.home) / ".cargo" / "bin").mkdir(parents=True)
    found = {grant.path: grant for grant in resolved(profile="dev").grants}
    assert {f"{caller.home}/.pyenv", f"{caller.home}/.cargo/bin"} <= set(found)
    assert found[f"{caller.home}/.pyenv"].clause == 'profile = "dev"'


def test_closing_closes_everything_and_may_be_repeated(caller: Caller, stockade_home: Path) -> None:
    before = descriptors()
    with resolve(Policy(workspace=".", read=["~/project", "/etc"]), caller, str(stockade_home)) as found:
        assert len(descriptors()) > len(before)
    assert descriptors() == before
    found.close()


def test_a_directory_that_cannot_be_the_workspace_says_why(caller: Caller, stockade_home: Path) -> None:
    assert unfit(caller.cwd, caller, str(stockade_home)) == ""
    assert "your home" in unfit(caller.home, caller, str(stockade_home))
    odd = Path(caller.cwd) / "a$b?"
    odd.mkdir()
    assert unfit(str(odd), caller, str(stockade_home)) == ""


def test_the_caller_is_known_without_a_home_or_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (None, "", "relative"):
        if home is None:
            monkeypatch.delenv("HOME", raising=False)
        else:
            monkeypatch.setenv("HOME", home)
        assert Caller.current().home.startswith("/")
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999)
    monkeypatch.setattr(os, "getgid", lambda: 3_999_998)
    caller = Caller.current()
    assert (caller.user, caller.group, caller.home) == ("3999999", "3999998", "/")


def test_a_current_directory_that_is_gone_matters_to_relative_paths_only(
    caller: Caller, stockade_home: Path
) -> None:
    lost = msgspec.structs.replace(caller, cwd="")
    resolve(Policy(read=["~/project"]), lost, str(stockade_home)).close()
    with pytest.raises(PolicyError, match="current directory was removed"):
        resolve(Policy(workspace="."), lost, str(stockade_home))


def test_the_state_directory_follows_the_environment() -> None:
    assert state.state_dir({"STOCKADE_HOME": "/s", "XDG_STATE_HOME": "/x"}, "/h") == "/s"
    assert state.state_dir({"XDG_STATE_HOME": "/x"}, "/h") == "/x/stockade"
    assert state.state_dir({"XDG_STATE_HOME": "x"}, "/h") == "/h/.local/state/stockade"


def test_the_state_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for _ in range(2):
        assert state.ensure(str(path)) == str(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.read_text() for file in path.iterdir()} == {"schema": f"{state.SCHEMA}\n"}


def test_a_state_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o750)
    with pytest.raises(SetupError, match="open to others") as caught:
        state.ensure(str(path))
    assert "chmod 700" in caught.value.hint


def test_a_state_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SetupError, match="belongs to uid"):
        state.ensure(str(path))


def test_a_state_directory_of_another_version_is_refused(tmp_path: Path) -> None:
    path = Path(state.ensure(str(tmp_path / "s")))
    (path / "schema").write_text(f"{state.SCHEMA + 1}\n")
    with pytest.raises(SetupError, match="newer version"):
        state.ensure(str(path))


def test_a_state_directory_that_cannot_be_made_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot use") as caught:
        state.ensure(str(tmp_path / "file" / "s"))
    assert caught.value.errno
