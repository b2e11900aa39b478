"""Private environments as values: which ids they have, what they refuse, what they say."""

from __future__ import annotations

import pytest

from stockade.errors import SetupError
from stockade.linux import id_maps, subordinate_ids
from stockade.linux.id_maps import BASE, IdMaps
from stockade.linux.user import Caller
from stockade.resolve.environment import KEPT, Environment, EnvironmentMount

ROOT = IdMaps(((0, 0, 1), (1, BASE + 1, 65535)), ((0, 0, 1), (1, BASE + 1, 65535)))
USER = Caller(uid=1000, gid=100, user="u", group="users", home="/home/u", cwd="/", environ={})


def test_ids_inside_are_those_of_a_range_outside() -> None:
    assert [ROOT.uid_outside(id) for id in (0, 1, 1000, 65535, 65536, -1)] == [
        0, BASE + 1, BASE + 1000, BASE + 65535, None, None,
    ]  # fmt: skip
    assert ROOT.has_uid(65535) and not ROOT.has_gid(65536)
    assert ROOT.has_outside(BASE + 7, 0) and not ROOT.has_outside(1000, 0)
    assert ROOT.describe() == "0 is the caller, 1 to 65535 are a range of their own"


def test_a_user_without_subordinate_ids_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subordinate_ids, "why_none", lambda uid: "newuidmap is not installed")
    maps = IdMaps.of_caller(USER)
    assert (maps.uids, maps.gids) == (((0, 1000, 1),), ((0, 100, 1),))
    assert maps.reason == "newuidmap is not installed" and not maps.several
    assert maps.describe() == "0 is the caller, no other id"


def test_a_user_gets_its_first_range_of_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {subordinate_ids.USERS: [(100000, 65536), (300000, 9)], subordinate_ids.GROUPS: [(200000, 10)]}
    monkeypatch.setattr(subordinate_ids, "why_none", lambda uid: "")
    monkeypatch.setattr(subordinate_ids, "ranges", lambda path, uid: ranges[path])
    maps = IdMaps.of_caller(USER)
    assert maps.uids == ((0, 1000, 1), (1, 100000, 65535))
    assert maps.gids == ((0, 100, 1), (1, 200000, 10))
    assert maps.has_uid(11) and not maps.has_gid(11)


def test_root_of_a_container_without_the_range_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_maps, "_unmapped_range", lambda: "this user namespace has no uids")
    maps = IdMaps.of_caller(Caller(uid=0, gid=0, user="r", group="r", home="/", cwd="/", environ={}))
    assert maps.uids == ((0, 0, 1),) and maps.reason


def test_seven_capabilities_are_kept() -> None:
    assert KEPT == 0b1111_1011


def mount(path: str) -> EnvironmentMount:
    return EnvironmentMount(path, -1, "write", "test")


@pytest.mark.parametrize(
    "paths",
    [("/a", "/a"), ("a",), ("/",), ("/a/",), ("/a//b",), ("/a/..",), ("/proc",), ("/dev/x",), ("/etc/a",)],
)
def test_mounts_that_are_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(SetupError, match="cannot be made"):
        Environment(tuple(map(mount, paths)), ROOT).check()


def test_commands_start_in_the_workspace_if_there_is_one() -> None:
    assert Environment((mount("/workspace"),), ROOT).start == "/workspace"
    assert Environment((mount("/data"),), ROOT, home="/root").start == "/root"


def test_it_says_what_is_mounted() -> None:
    mounts = (
        mount("/tmp"),
        EnvironmentMount("/data", -1, "read", ""),
        EnvironmentMount("/w", -1, "overlay", ""),
    )
    assert Environment(mounts, ROOT, image="/x").describe() == (
        "a private environment on an image; /tmp writable; /data read-only; /w copy-on-write"
    )
