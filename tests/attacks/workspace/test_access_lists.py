"""Access lists that a program leaves on files: a commit gives nobody more than the host's own files do."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.means import applies, need
from support.trees import PYTHON, changed

IS_ROOT = os.geteuid() == 0
STOCKADE = str(Path(sys.executable).with_name("stockade"))

#: Entries of an access list, as the kernel tags them.
OWNER, USER, GROUP, NAMED_GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NOBODY, STRANGER = -1, 1234
Entry = tuple[int, int, int]


def give_list(path: Path | str, *entries: Entry, kind: str = "access") -> None:
    """Give a file an access list: each entry has a tag, a permission and whom it is for."""
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", data)
    except OSError as error:
        need(False, f"the file system keeps no access lists: {error.strerror}")


def list_of(path: Path, kind: str = "access") -> list[Entry]:
    """The access list of a file; empty if it has none."""
    try:
        data = os.getxattr(path, f"system.posix_acl_{kind}")
    except OSError:
        return []
    return [struct.unpack_from("<HHi", data, at) for at in range(4, len(data), 8)]


def open_to(user: int, *, group: int = 6) -> list[Entry]:
    """The entries by which a stranger may do what `user` says."""
    nobody = NOBODY
    return [
        (OWNER, 6, nobody),
        (USER, user, STRANGER),
        (GROUP, group, nobody),
        (MASK, 6, nobody),
        (OTHER, 4, nobody),
    ]


def stranger_may_write(path: Path) -> bool:
    """Whether another user of the machine can open a file for writing."""
    code = "import os, sys; os.setgroups([]); os.setgid(1234); os.setuid(1234); open(sys.argv[1], 'a')"
    done = subprocess.run([PYTHON, "-c", code, path.name], cwd=path.parent, capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "sub").mkdir()
    (workspace / "sub" / "inner").write_text("inner\n")
    return workspace


def test_an_access_list_lets_nobody_write_who_could_not(project: Path) -> None:
    (project / "ours").write_text("ours\n")
    (project / "ours").chmod(0o664)
    workspace = changed(project, "echo x >> ours; echo > new; chmod 664 new")
    for name in ("ours", "new"):
        give_list(f"{workspace.layer}/upper/{name}", *open_to(6))
    done = workspace.commit()
    assert list_of(project / "ours") == list_of(project / "new") == []
    modes = [stat.S_IMODE((project / name).stat().st_mode) for name in ("ours", "new")]
    assert modes == [0o664, 0o644]
    what = f"rw- for user {STRANGER} removed from its access list"
    assert [note.path for note in done.notes if note.what == what] == ["new", "ours"]


def test_one_that_a_program_of_roots_sets_does_not_open_a_file_to_another_user(project: Path) -> None:
    applies(IS_ROOT, "inside, others know only their own id")
    (project / "ours").write_text("ours\n")
    (project / "ours").chmod(0o664)
    entries = open_to(6)
    script = f"""
import os, struct
data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in {entries})
os.setxattr("ours", "system.posix_acl_access", data)
"""
    workspace = changed(project, script, python=True)
    upper = Path(workspace.layer) / "upper/ours"
    assert list_of(upper) == entries, "the control: it was set"
    workspace.commit()
    assert list_of(project / "ours") == []
    give_list(project / "sub/inner", *entries)
    assert stranger_may_write(project / "sub/inner"), "the control: the list would open it"
    assert not stranger_may_write(project / "ours")


def test_one_keeps_what_the_hosts_file_gives(project: Path) -> None:
    for name, permission in (("reader", 4), ("writer", 6)):
        (project / name).write_text("ours\n")
        give_list(project / name, *open_to(permission, group=4))
    workspace = changed(project, "echo x >> reader; echo x >> writer")
    for name in ("reader", "writer"):
        give_list(f"{workspace.layer}/upper/{name}", *open_to(6, group=6))
    done = workspace.commit()
    assert list_of(project / "reader") == open_to(4, group=4)
    assert list_of(project / "writer") == open_to(6, group=4)
    assert sorted((note.path, note.what) for note in done.notes) == [
        ("reader", f"-w- for user {STRANGER} removed from its access list"),
        ("reader", "write permission for its group removed"),
        ("writer", "write permission for its group removed"),
    ]


def test_one_that_is_taken_away_does_not_let_the_group_write(project: Path) -> None:
    """The group's bits of a file with a list are its mask: without the list they would be the group's."""
    (project / "ours").write_text("ours\n")
    give_list(project / "ours", *open_to(6, group=4))
    assert stat.S_IMODE((project / "ours").stat().st_mode) == 0o664
    done = changed(project, "rm ours; echo x > ours; chmod 664 ours").commit()
    assert list_of(project / "ours") == []
    assert stat.S_IMODE((project / "ours").stat().st_mode) == 0o644
    assert [note.what for note in done.notes] == ["write permission for its group removed"]


def test_that_of_a_directory_is_given_to_what_is_new_in_it_and_to_nothing_else(project: Path) -> None:
    inherited = [
        (OWNER, 7, NOBODY),
        (USER, 7, STRANGER),
        (GROUP, 5, NOBODY),
        (MASK, 7, NOBODY),
        (OTHER, 5, NOBODY),
    ]
    for path in (project, project / "sub"):
        give_list(path, *inherited, kind="default")
    (project / "closed").mkdir()
    os.removexattr(project / "closed", "system.posix_acl_default")
    script = "echo x >> file; echo x >> sub/inner; for d in . sub closed; do echo > $d/new; done"
    changed(project, script).commit()
    lists = {name: list_of(project / name) for name in ("file", "sub/inner", "closed/new")}
    assert lists == {"file": [], "sub/inner": [], "closed/new": []}
    for name in ("new", "sub/new"):
        assert (USER, 7, STRANGER) in list_of(project / name)
        assert stat.S_IMODE((project / name).stat().st_mode) == 0o644


def test_that_of_a_directory_is_not_taken_over(project: Path) -> None:
    workspace = changed(project, "mkdir made; echo > made/new; echo > sub/new; chmod 700 sub")
    entries = [
        (OWNER, 7, NOBODY),
        (USER, 7, STRANGER),
        (GROUP, 7, NOBODY),
        (MASK, 7, NOBODY),
        (OTHER, 5, NOBODY),
    ]
    for name in ("", "made", "sub"):
        for kind in ("access", "default"):
            give_list(f"{workspace.layer}/upper/{name}", *entries, kind=kind)
    workspace.commit()
    for path in (project, project / "made", project / "sub"):
        assert list_of(path) == list_of(path, "default") == []
        assert path.stat().st_mode & 0o022 == 0


def test_that_of_one_name_of_a_file_is_not_that_of_the_others(project: Path) -> None:
    (project / "writer").write_text("ours\n")
    give_list(project / "writer", *open_to(6))
    (project / "private").write_text("mine\n")
    (project / "private").chmod(0o664)
    workspace = changed(project, "echo x >> writer; ln writer another; ln -f writer private")
    workspace.commit()
    assert list_of(project / "writer") == open_to(6)
    assert list_of(project / "private") == list_of(project / "another") == []


def test_access_lists_are_shown(project: Path) -> None:
    workspace = changed(project, "echo > new; mkdir d; touch file sub/inner; chmod 600 sub/inner")
    for name in ("new", "file", "d"):
        give_list(f"{workspace.layer}/upper/{name}", *open_to(6))
    os.setxattr(f"{workspace.layer}/upper/sub/inner", "user.color", b"red")
    found = {one.path: one.what for one in workspace.diff().files}
    assert found["new"] == found["d"] == ("access",)
    assert found["file"] == ("mode", "access")
    assert found["sub/inner"] == ("mode", "attributes")
    environ = {**os.environ, "STOCKADE_PAGER": ""}
    words = [STOCKADE, "diff", workspace.id]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=True)
    assert "modified  file  mode 0644 → 0664  its access list changed" in done.stdout
    assert "added     new  with an access list" in done.stdout
    assert "added     d/  with an access list" in done.stdout
