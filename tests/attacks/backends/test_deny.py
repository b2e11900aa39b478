"""Denied paths: hidden by name in whatever is shown, also while the host works on them."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import IS_ROOT, inside, outside
from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.runs.launch import LaunchedSandbox, launch
from stockade.runs.prepare import RunPreparation
from stockade.sandbox import sandbox
from support.means import applies, need

SECRET = "the secret\n"
NAMES = [".env", "config/deep/key"]


@pytest.fixture
def project(workspace: Path) -> Path:
    for name in NAMES:
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(SECRET)
        (workspace / name).with_name("beside").write_text("beside\n")
    return workspace


def shown(project: Path, how: str, name: str) -> dict[str, Any]:
    """Three ways to show a tree in which a name is denied."""
    denied = {"deny": [str(project / name)]}
    if how == "granted":
        return {"read": [str(project)], **denied}
    if how == "granted with sockets":
        return {"read": [str(project)], "accept": ["ipc"], **denied}
    return {"workspace": {"path": str(project), "mode": how}, **denied}


NOT_UTF8 = os.fsdecode(b"not-utf8-\xff\xfe")
WAYS = ["overlay", "ro", "granted", "granted with sockets"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", WAYS)
def test_a_denied_file_cannot_be_read_under_any_name(project: Path, how: str, name: str) -> None:
    (project / "link").symlink_to(name)
    (project / "link2").symlink_to(project / "link")
    verdict = inside("denied", "search", project, name, **shown(project, how, name))
    assert set(verdict.values()) <= {"No such file or directory", "Permission denied"}, verdict
    assert verdict["plain"] == "No such file or directory"
    control = outside("denied", "search", project, name)
    assert SECRET in (control["plain"], control["link of a link"]) and control["by descriptor"] == SECRET


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", WAYS)
def test_a_denied_file_does_not_exist_to_any_call(project: Path, how: str, name: str) -> None:
    verdict = inside("denied", "calls", project, name, **shown(project, how, name))
    # Some calls ask first whether the tree could be written at all.
    for call in ("link", "rename", "unlink", "rmdir"):
        assert verdict.pop(call) in ("ENOENT", "EROFS", "EXDEV")
    assert set(verdict.values()) == {"ENOENT"}, verdict
    assert outside("denied", "calls", project, name)["stat"] == "ok"


@pytest.mark.parametrize("how", WAYS)
def test_a_denied_directory_is_hidden_with_all_that_is_in_it(project: Path, how: str) -> None:
    verdict = inside("denied", "calls", project, "config", **shown(project, how, "config"))
    assert verdict["stat"] == verdict["listed"] == verdict["chdir"] == "ENOENT"
    policy = shown(project, how, "config")
    assert inside("files", "read,stat", project / NAMES[1], **policy) == {"read": "ENOENT", "stat": "ENOENT"}
    assert outside("files", "read", project / NAMES[1]) == {"read": SECRET}


@pytest.mark.parametrize("how", WAYS)
def test_what_is_beside_a_denied_file_is_as_it_was(project: Path, how: str) -> None:
    above = project / "config" / "deep"
    above.chmod(0o750)
    policy = Policy(**shown(project, how, NAMES[1]))
    listed = stockade.run(["sh", "-c", f"cd {above} && cat beside && ls -A && stat -c '%a %u %Y' ."], policy)
    before = os.stat(above)
    assert listed.text == f"beside\nbeside\n750 {before.st_uid} {int(before.st_mtime)}\n", listed.stderr


def test_a_directory_that_only_a_list_keeps_shut_stays_shut(project: Path) -> None:
    """Its mode alone would let the group in: with an access list the group bits are the list's mask."""
    applies(IS_ROOT, "only root can give a directory away")
    shut = project / "shut"
    shut.mkdir()
    # The group may enter but not list; the owner and one other may do all.
    entries = [(1, 7, -1), (2, 7, 4321), (4, 1, -1), (16, 7, -1), (32, 0, -1)]
    rules = struct.pack("=I", 2) + b"".join(struct.pack("=HHi", *entry) for entry in entries)
    os.chown(shut, 4321, 0)
    os.setxattr(shut, "system.posix_acl_access", rules)
    assert shut.stat().st_mode & 0o777 == 0o770
    for how in WAYS:
        policy = shown(project, how, "shut/key")
        assert inside("files", "stat,open", shut, **policy) == {"stat": "ok", "open": "EACCES"}
        del policy["deny"]
        assert inside("files", "stat,open", shut, **policy) == {"stat": "ok", "open": "EACCES"}


def test_what_cannot_be_looked_up_is_not_taken_for_hidden(project: Path) -> None:
    """The gate has to see that the name is absent; where it may not even look, nothing starts."""
    shut = project / "shut"
    shut.mkdir(mode=0)
    with pytest.raises(SetupError, match=r"mask .*/shut/key: Permission denied"):
        stockade.run(["true"], Policy(**shown(project, "overlay", "shut/key")))
    shut.chmod(0o700)


@pytest.mark.parametrize(
    "name", ["co:lon,com ma", "new\nline", "back\\slash", "x" * 255, "d/" * 100 + "end", NOT_UTF8]
)
def test_any_name_can_be_hidden(project: Path, name: str) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text(SECRET)
    for how in WAYS:
        assert inside("files", "read", project / name, **shown(project, how, name)) == {"read": "ENOENT"}
    assert outside("files", "read", project / name) == {"read": SECRET}


def replaced(path: Path) -> None:
    """As an editor saves: a new file, renamed over the old one."""
    new = path.with_name(".saving")
    new.write_text(SECRET)
    new.rename(path)


def made_again(path: Path) -> None:
    path.unlink()
    path.write_text(SECRET)


def directory_made_again(path: Path) -> None:
    old = path.parent.with_name("old")
    path.parent.rename(old)
    path.parent.mkdir()
    path.write_text(SECRET)
    for file in old.iterdir():
        file.unlink()
    old.rmdir()


@pytest.mark.parametrize("work", [replaced, made_again, directory_made_again])
@pytest.mark.parametrize("how", WAYS)
def test_the_host_does_not_uncover_a_denied_file_by_working_on_it(
    project: Path, how: str, work: Callable[[Path], None]
) -> None:
    name = NAMES[1]
    with Sandbox(Policy(**shown(project, how, name)), on_exit="discard") as box:
        for _ in range(3):
            looked = box.run(["cat", str(project / name)])
            assert (looked.exit_code, looked.stdout) == (1, b"")
            work(project / name)
            looked = box.run(["ls", "-A", str((project / name).parent)])
            assert b"key" not in looked.stdout.split()
    assert (project / name).read_text() == SECRET


@pytest.mark.parametrize("how", ["overlay", "ro"])
def test_a_program_that_waits_for_the_host_to_save_the_file_never_sees_it(project: Path, how: str) -> None:
    stop = threading.Event()

    def edit() -> None:
        while not stop.is_set():
            replaced(project / ".env")
            made_again(project / ".env")
            time.sleep(0.001)

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        verdict = inside("denied", "watch", project, ".env", 1.5, **shown(project, how, ".env"))
        control = outside("denied", "watch", project, ".env", 0.5)
    finally:
        stop.set()
        editor.join()
    assert verdict == [True, 0]
    assert control[1] > 0


@pytest.mark.parametrize("how", WAYS)
def test_a_directory_on_the_way_that_becomes_a_link_before_the_walls_are_up_uncovers_nothing(
    project: Path, how: str
) -> None:
    """The name was looked up in a directory; now it would be found elsewhere in the same tree."""

    def late(prepared: RunPreparation, *rest: Any) -> LaunchedSandbox:
        (project / "config").rename(project / "moved")
        (project / "config").symlink_to("moved")
        return launch(prepared, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "launch", late)
        policy = Policy(**shown(project, how, NAMES[1]))
        looked = stockade.run(["cat", str(project / NAMES[1])], policy, cwd="/", on_exit="discard")
    assert (looked.exit_code, looked.stdout) == (1, b"")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["later", "none/of/this"])
def test_a_file_that_the_host_makes_later_is_hidden_too(project: Path, how: str, name: str) -> None:
    with Sandbox(Policy(**shown(project, how, name)), on_exit="discard") as box:
        assert box.run(["cat", str(project / name)]).exit_code == 1
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(SECRET)
        looked = box.run(["cat", str(project / name)])
        assert (looked.exit_code, looked.stdout) == (1, b"")


def test_moving_the_directory_above_does_not_uncover_a_denied_file(project: Path) -> None:
    answer, *seen = inside("denied", "move", project, NAMES[1], **shown(project, "overlay", NAMES[1]))
    assert answer == "EXDEV" and set(seen) == {"No such file or directory"}
    assert SECRET in outside("denied", "move", project, NAMES[1])


def test_removing_the_directory_above_does_not_uncover_a_denied_file(project: Path) -> None:
    verdict = inside("denied", "again", project, NAMES[1], **shown(project, "overlay", NAMES[1]))
    assert verdict == ["ENOENT", "mine", "ENOENT", "ENOENT"]
    assert (project / NAMES[1]).read_text() == SECRET


@pytest.mark.parametrize("way", ["marks", "exchange"])
def test_the_overlay_cannot_be_talked_into_showing_a_denied_file(project: Path, way: str) -> None:
    assert inside("denied", way, project, NAMES[1], **shown(project, "overlay", NAMES[1])) == ["ENOENT"]
    assert "ok" in outside("denied", way, project, NAMES[1])


def test_a_program_may_have_a_file_of_its_own_by_a_denied_name(project: Path) -> None:
    result = stockade.run(
        ["sh", "-c", "echo mine > .env && cat .env"], Policy(**shown(project, "overlay", ".env"))
    )
    assert result.text == "mine\n"
    assert [(change.path, change.kind) for change in result.changes] == [(".env", "modified")]
    assert (project / ".env").read_text() == SECRET


def test_hiding_files_changes_nothing_in_the_workspace(project: Path) -> None:
    denied = [str(project / name) for name in (*NAMES, "none/of/this")]
    result = stockade.run(["find", "."], Policy(workspace=str(project), deny=denied))
    assert result.changes == () or list(result.changes) == []
    assert "key" not in result.text and "none" not in result.text and "./config/deep/beside" in result.text


def test_a_grant_in_a_denied_tree_is_not_shown(project: Path) -> None:
    policy = {"workspace": str(project), "deny": [str(project / "config")]}
    deep = project / "config" / "deep"
    for grant in ({"read": [str(deep)]}, {"write": [str(deep)]}, {"read": [str(deep / "key")]}):
        verdict = inside("files", "stat,open", deep / "key", **policy, **grant)
        assert verdict == {"stat": "ENOENT", "open": "ENOENT"}


def test_a_name_below_a_file_can_be_denied(project: Path) -> None:
    """In a file alone there is nothing to hide; in a tree the host could make it a directory."""
    below = str(project / ".env" / "x")
    assert inside("files", "read", project / ".env", read=[str(project / ".env")], deny=[below]) == {
        "read": SECRET
    }
    assert inside("files", "read", project / ".env", read=[str(project)], deny=[below]) == {"read": "ENOENT"}


def test_a_denied_file_is_hidden_in_a_grant_within_the_workspace_too(project: Path) -> None:
    deep = project / "config" / "deep"
    policy = {"workspace": str(project), "read": [str(deep)], "deny": [str(deep / "key")]}
    assert inside("files", "read", deep / "key", **policy) == {"read": "ENOENT"}
    assert inside("files", "read", deep / "beside", **policy) == {"read": "beside\n"}


def test_a_denied_link_is_hidden_and_so_is_what_it_leads_to(project: Path, tmp_path: Path) -> None:
    (project / "shared").write_text(SECRET)
    (project / ".env").unlink()
    (project / ".env").symlink_to("middle")
    (project / "middle").symlink_to("shared")
    policy = shown(project, "overlay", ".env")
    for name in (".env", "middle", "shared"):
        assert inside("files", "read,lstat", project / name, **policy) == {
            "read": "ENOENT",
            "lstat": "ENOENT",
        }
    with Sandbox(Policy(**policy), on_exit="discard") as box:
        replaced(project / ".env")  # the host puts a file in place of the link
        assert box.run(["cat", ".env"]).exit_code == 1


@pytest.mark.parametrize(
    "path", ["/usr/bin/env", "/bin/env", "/etc/ssl/certs", "/etc/services", "/etc/passwd", "/usr/share"]
)
def test_a_path_of_the_system_can_be_hidden(path: str) -> None:
    need(os.path.lexists(path), f"{path} is not on this host")
    assert inside("files", "stat,open", path, deny=[path]) == {"stat": "ENOENT", "open": "ENOENT"}
    assert inside("files", "stat", path) == {"stat": "ok"}
    other = stockade.run(["ls", "/usr/bin", "/etc"], Policy(deny=[path]))
    assert other.exit_code == 0 and len(other.text.split()) > 100


def test_a_file_in_a_directory_of_etc_can_be_hidden_and_the_rest_stays() -> None:
    directory = Path("/etc/alternatives")
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    need(len(names) > 1, "this host has no /etc/alternatives")
    listed = stockade.run(["ls", str(directory)], Policy(deny=[str(directory / names[0])]))
    assert sorted(listed.text.split()) == names[1:]


def test_a_path_that_nothing_shows_is_hidden_already(project: Path, hidden: Path) -> None:
    policy = {"workspace": str(project), "deny": [str(hidden), "~/.ssh", "/var/lib/none"]}
    assert inside("files", "read", hidden / "secret", **policy) == {"read": "ENOENT"}
    assert outside("files", "read", hidden / "secret") == {"read": SECRET}


def test_more_than_a_plan_can_hold_is_refused(project: Path) -> None:
    with pytest.raises(PolicyError, match="10001 paths"):
        stockade.run(["true"], Policy(workspace=str(project), deny=[f"{n}" for n in range(10_001)]))
    many = Policy(workspace=str(project), deny=[f"{n}/x" for n in range(10_000)])
    assert stockade.run(["cat", "7/x"], many).exit_code == 1


REFUSED = [
    ({"workspace": {"path": "{project}", "mode": "rw"}, "protect": []}, "{project}/.env", "overlay"),
    ({"write": ["{project}"]}, "{project}/.env", "beside"),
    ({"workspace": "{project}"}, "{project}", "in the workspace"),
    ({"workspace": "{project}"}, "{project}/..", "in the workspace"),
    ({}, "/proc/1", "leave it out"),
    ({}, "/dev/null", "leave it out"),
    ({}, "/sys", "leave it out"),
    ({}, "/", "in it"),
    ({}, "/etc", "in it"),
]


@pytest.mark.parametrize(("policy", "path", "hint"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_hidden_for_good_is_refused(
    project: Path, policy: dict[str, Any], path: str, hint: str
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return value.replace("{project}", str(project))

    name = str(project.parent) if path.endswith("..") else filled(path)
    with pytest.raises(PolicyError) as caught:
        stockade.run(["true"], Policy(**filled(policy), deny=[name]))
    assert "deny = " in caught.value.message and hint in caught.value.hint
