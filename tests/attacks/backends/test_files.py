"""Files: what is hidden cannot be named, linked, moved or read, and what is read-only cannot be changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from attacks.arena import inside, outside
from support.means import applies

LOOKING = "stat,lstat,open,open-path,readlink,statfs,chdir"
CHANGING = "chmod,chown,utime,setxattr"
UNSHOWN = [
    "/sys", "/sys/kernel", "/boot", "/run/lock", "/run/systemd", "/run/user", "/home", "/mnt", "/media",
    "/srv", "/opt", "/var/lib", "/var/log", "/var/run", "/etc/shadow", "/etc/gshadow", "/etc/sudoers",
    "/etc/ssh", "/etc/machine-id", "/etc/fstab",
]  # fmt: skip
HOSTILE = [
    "with space", "new\nline", "tab\tbed", "back\\slash", "octal\\040", "#comment", "co:lon,comma",
    "ünïcödé ☃", "quote'\"", "-rf", "$HOME", "*?[", "trailing ", os.fsdecode(b"not-utf8-\xff\xfe"), "x" * 255,
]  # fmt: skip


def answers(ways: str, answer: str) -> dict[str, str]:
    return dict.fromkeys(ways.split(","), answer)


@pytest.mark.parametrize("mode", ["overlay", "rw", "ro"])
def test_a_link_in_the_workspace_does_not_lead_to_a_secret(workspace: Path, hidden: Path, mode: str) -> None:
    link = workspace / "innocent"
    link.symlink_to(hidden / "secret")
    rule = {"path": str(workspace), "mode": mode}
    assert inside("files", "read,stat,open", link, workspace=rule, protect=[]) == answers(
        "read,stat,open", "ENOENT"
    )
    assert outside("files", "read", link) == {"read": "the secret\n"}


def test_a_link_made_inside_does_not_lead_to_a_secret(workspace: Path, hidden: Path) -> None:
    made = workspace / "made"
    verdict = inside("files", "symlink-and-read", hidden / "secret", made, workspace=str(workspace))
    assert verdict == {"symlink-and-read": "ENOENT"}
    assert outside("files", "symlink-and-read", hidden / "secret", made) == {"symlink-and-read": "ok"}


@pytest.mark.parametrize("way", ["link", "link-by-descriptor"])
def test_a_hidden_file_cannot_be_linked_into_a_writable_directory(
    granted: Path, hidden: Path, way: str
) -> None:
    new = granted / "linked"
    assert inside("files", way, hidden / "secret", new, write=[str(granted)]) == {way: "ENOENT"}
    assert outside("files", way, hidden / "secret", new) == {way: "ok"}


@pytest.mark.parametrize("way", ["link", "link-by-descriptor", "move"])
def test_a_readable_file_cannot_be_made_writable_under_another_name(
    granted: Path, workspace: Path, way: str
) -> None:
    file, new = granted / "file", workspace / "mine"
    policy = {"read": [str(granted)], "write": [str(workspace)]}
    assert inside("files", way, file, new, **policy)[way] in ("EXDEV", "EPERM", "EROFS")
    assert not new.exists()
    assert outside("files", way, file, new) == {way: "ok"}


def test_a_hidden_directory_cannot_be_moved_to_where_it_is_seen(workspace: Path, hidden: Path) -> None:
    new = workspace / "stolen"
    assert inside("files", "move", hidden, new, write=[str(workspace)])["move"] in ("ENOENT", "EXDEV")
    assert outside("files", "move", hidden, new) == {"move": "ok"}


def test_a_granted_directory_cannot_be_moved_away(granted: Path, workspace: Path) -> None:
    new = workspace / "stolen"
    policy = {"read": [str(granted)], "write": [str(workspace)]}
    assert inside("files", "move", granted, new, **policy)["move"] in ("EXDEV", "EBUSY", "EROFS")
    assert outside("files", "move", granted, new) == {"move": "ok"}


@pytest.mark.parametrize(
    "path", ["/usr/bin/env", "/etc/passwd", "/etc/hosts", "/dev/null", "/proc/1", "/usr", "/"]
)
def test_the_systems_files_cannot_be_changed(path: str, tmp_path: Path) -> None:
    assert inside("files", CHANGING, path) == answers(CHANGING, "EROFS")
    own = tmp_path / "copy"
    own.mkdir() if os.path.isdir(path) else shutil.copy("/etc/passwd", own)
    assert outside("files", CHANGING, own) == answers(CHANGING, "ok")


@pytest.mark.parametrize(
    "path", ["/usr/bin/env", "/etc/passwd", "/etc/hosts", "/dev/null", "/proc/1", "/usr", "/dev"]
)
def test_the_systems_files_cannot_be_replaced(path: str, tmp_path: Path) -> None:
    ways = "truncate,rename,unlink"
    verdict = inside("files", ways, path)
    assert set(verdict.values()) <= {"EROFS", "EACCES", "EPERM", "EBUSY", "EISDIR", "EINVAL"}, verdict
    own = tmp_path / "copy"
    shutil.copy("/etc/passwd", own)
    assert outside("files", "truncate,rename", own) == answers("truncate,rename", "ok")


@pytest.mark.parametrize("how", ["read", "ro"])
def test_a_file_that_may_only_be_read_cannot_be_changed(granted: Path, how: str) -> None:
    file, ways = granted / "file", f"{CHANGING},truncate,write,rename,unlink"
    workspace = {"workspace": {"path": str(granted), "mode": "ro"}}
    verdict = inside("files", ways, file, **(workspace if how == "ro" else {"read": [str(granted)]}))
    assert verdict == answers(ways, "EROFS")
    assert file.read_text() == "original\n"
    assert outside("files", f"{CHANGING},write", file) == answers(f"{CHANGING},write", "ok")


@pytest.mark.parametrize("directory", ["/", "/usr", "/etc", "/dev", "/proc", "/var", "/dev/pts"])
def test_nothing_can_be_added_to_the_systems_directories(directory: str, tmp_path: Path) -> None:
    verdict = inside("files", "create,mkdir", os.path.join(directory, "planted"))
    assert set(verdict.values()) <= {"EROFS", "EACCES", "EPERM", "ENOENT"}
    assert "ok" not in verdict.values()
    assert outside("files", "create", tmp_path / "planted") == {"create": "ok"}


def test_changes_in_an_overlay_workspace_stay_in_the_overlay(granted: Path) -> None:
    ways = "write,chmod,utime,rename"
    assert inside("files", ways, granted / "file", workspace=str(granted)) == answers(ways, "ok")
    assert (granted / "file").read_text() == "original\n"
    assert outside("files", ways, granted / "file") == answers(ways, "ok")


def test_secrets_in_the_home_do_not_exist_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    key = home / ".ssh" / "id_rsa"
    key.write_text("a private key\n")
    monkeypatch.setenv("HOME", str(home))
    for path in (key, key.parent):
        assert inside("files", LOOKING, path) == answers(LOOKING, "ENOENT")
    assert outside("files", "stat,open,read", key)["read"] == "a private key\n"


def test_what_lies_beside_the_workspace_does_not_exist_inside(workspace: Path, hidden: Path) -> None:
    for path in (hidden, hidden / "secret", workspace / ".." / hidden.name / "secret"):
        assert inside("files", LOOKING, path, workspace=str(workspace)) == answers(LOOKING, "ENOENT")
    assert outside("files", "stat,open-path", hidden / "secret") == answers("stat,open-path", "ok")


def test_stockades_own_state_does_not_exist_inside(workspace: Path, stockade_home: Path) -> None:
    ways = "stat,open,chdir,open-path"
    for path in (stockade_home, stockade_home / "schema", stockade_home / "workspaces"):
        assert inside("files", ways, path, workspace=str(workspace)) == answers(ways, "ENOENT")
    assert outside("files", ways, stockade_home) == answers(ways, "ok")


@pytest.mark.parametrize("path", UNSHOWN)
def test_a_system_path_that_no_one_needs_does_not_exist_inside(path: str) -> None:
    ways = "stat,lstat,open,open-path,statfs"
    home = os.path.realpath(os.path.expanduser("~"))
    applies(os.path.commonpath([path, home]) != path, f"the private home is in {path}")
    assert inside("files", ways, path) == answers(ways, "ENOENT")
    if os.path.lexists(path):
        assert outside("files", "lstat,open-path", path) == answers("lstat,open-path", "ok")


@pytest.mark.parametrize("how", ["read", "ro"])
def test_a_pipe_in_a_readable_directory_cannot_be_written_to(granted: Path, how: str) -> None:
    """A read-only mount alone does not keep anybody from writing into a FIFO."""
    pipe = granted / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ro = {"workspace": {"path": str(granted), "mode": "ro"}}
        inside("files", "write-now", pipe, **(ro if how == "ro" else {"read": [str(granted)]}))
        assert os.read(reader, 16) == b""
        assert outside("files", "write-now", pipe) == {"write-now": "ok"}
        assert os.read(reader, 16) == b"x"
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_granted_as_itself_and_nothing_more(
    tmp_path: Path, hidden: Path, name: str
) -> None:
    from stockade.policy.values import literal

    for kind in ("read", "write", "overlay", "ro"):
        directory = tmp_path / kind / name
        directory.mkdir(parents=True)
        (directory / "file").write_text("original\n")
        path = literal(str(directory))
        rule = {"path": path, "mode": kind}
        policy = {kind: [path]} if kind in ("read", "write") else {"workspace": rule}
        assert inside("files", "read", directory / "file", **policy) == {"read": "original\n"}
        assert inside("files", "stat", hidden / "secret", **policy) == {"stat": "ENOENT"}
    assert outside("files", "stat", hidden / "secret") == {"stat": "ok"}
