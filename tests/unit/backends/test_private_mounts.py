"""The operations for the mounts of a private environment."""

from __future__ import annotations

from pathlib import Path

from stockade.backends.plan_parts import SystemPath
from stockade.backends.private_mounts import OwnMount, image_layout, own_mounts
from stockade.gate import operations as ops


def own(path: str, access: str, descriptor: int = 1) -> OwnMount:
    return OwnMount(path, f"/state/tree{path}", access, True, "test", descriptor, layer="/state/layer")


def test_directories_above_a_mount_in_a_writable_one_are_mounted_too() -> None:
    found = own_mounts((own("/w", "write"), own("/w/a/b/c", "read", 2)), noexec=False, private=False)
    assert sorted(found) == ["/w", "/w/a", "/w/a/b", "/w/a/b/c"]
    pinned = found["/w/a/b"]
    assert isinstance(pinned, ops.Bind) and pinned.writable and pinned.source == "/state/tree/w/a/b"


def test_nothing_is_pinned_in_what_is_read_only() -> None:
    found = own_mounts((own("/w", "read"), own("/w/a/b", "write", 2)), noexec=False, private=False)
    assert sorted(found) == ["/w", "/w/a/b"]


def test_where_a_tree_lies_does_not_change_the_plan() -> None:
    for access in ("read", "write", "overlay"):
        (op,) = own_mounts((own("/w", access),), noexec=False, private=False).values()
        assert b"/state" in op.record() and b"/state" not in op.anywhere().data().replace(b"/upper", b"")


def test_an_image_is_shown_without_what_every_sandbox_has_of_its_own(tmp_path: Path) -> None:
    for name in ("usr", "etc/conf", "dev", "proc", "sys", "tmp", "run", "var", "opt"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("hosts", "resolv.conf", "hostname", "passwd"):
        (tmp_path / "etc" / name).write_text("x")
    (tmp_path / "bin").symlink_to("usr/bin")
    shown = image_layout(str(tmp_path), ("/root", "/var"), ())
    assert {one.path for one in shown} == {"/usr", "/opt", "/bin", "/etc/conf", "/etc/passwd"}
    assert SystemPath("/bin", link="usr/bin") in shown
