"""The plan decoder: what is not exactly a plan is refused before the first side effect."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, gate
from stockade.backends.observed_plan import observed
from stockade.gate import client, wire
from stockade.gate import operations as ops
from stockade.gate.bwrap_operations import Devices, Helper
from stockade.host import host
from stockade.runs import prepare
from stockade.runs.network.egress_process import egress_plan
from support import gatebuild, mapped
from support.means import need_program

HEADER = struct.Struct("=8sIIII")
RECORD = struct.Struct("=IIQQ")
NAMESPACES, HOSTNAME, ROOT, DIR = ops.Namespaces.kind, ops.Hostname.kind, ops.Root.kind, ops.Dir.kind
FILE, LINK, BIND, PROC, OVERLAY = (
    ops.File.kind,
    ops.Symlink.kind,
    ops.Bind.kind,
    ops.Proc.kind,
    ops.Overlay.kind,
)
PIVOT, KEYRING, LIMIT, PRIVILEGES = ops.Pivot.kind, ops.Keyring.kind, ops.Limit.kind, ops.Privileges.kind
LANDLOCK, GRANT, SECCOMP = ops.LandlockRules.kind, ops.BindGrant.kind, ops.Seccomp.kind
PORT, OBSERVE = ops.PortGrant.kind, ops.Observe.kind
SCRATCH, VIEW, MASK = ops.ScratchMount.kind, ops.View.kind, ops.Mask.kind


class Plan(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_uint),
        ("base", ctypes.c_uint),
        ("ops", ctypes.c_void_p),
        ("base_bytes", ctypes.c_void_p),
        ("base_size", ctypes.c_size_t),
        ("ahead", ctypes.c_uint),
        ("ahead_size", ctypes.c_size_t),
    ]


class PlanError(ctypes.Structure):
    _fields_ = [("index", ctypes.c_uint), ("reason", ctypes.c_char_p)]


def decode(data: bytes, descriptors: int = 0) -> tuple[int, str]:
    """Where and why the decoder refuses; (-1, "") if it does not."""
    library = ctypes.CDLL(gate.library())
    plan, error = Plan(), PlanError()
    refused = library.plan_decode(
        ctypes.c_char_p(data),
        ctypes.c_size_t(len(data)),
        descriptors,
        ctypes.byref(plan),
        ctypes.byref(error),
    )
    if refused:
        return error.index, error.reason.decode()
    library.plan_free(ctypes.byref(plan))
    return -1, ""


ACCEPTED = (-1, "")


def record(kind: int, a: int = 0, b: int = 0, data: bytes = b"", size: int | None = None) -> bytes:
    padded = data + bytes(-len(data) % 8)
    return RECORD.pack(kind, RECORD.size + len(padded) if size is None else size, a, b) + padded


FIRST = [record(NAMESPACES, 0x30020000)]
ROOTED = [*FIRST, record(ROOT)]
WALLS = [
    record(PIVOT),
    record(PRIVILEGES),
    record(LANDLOCK, 1),
    record(SECCOMP, 0, 8, bytes(8)),
]


def plan(*records: bytes, base: int = 0, count: int | None = None, size: int | None = None) -> bytes:
    body = b"".join(records)
    total = HEADER.size + len(body) if size is None else size
    return (
        HEADER.pack(wire.PLAN_MAGIC.encode(), total, len(records) if count is None else count, base, 0) + body
    )


def with_mount(*records: bytes) -> bytes:
    """A plan with these operations where mounts belong: from index 2."""
    return plan(*ROOTED, *records, *WALLS)


SMALLEST = plan(*ROOTED, *WALLS)


#: A plan without namespaces has no mounts either.
PLAIN = plan(record(NAMESPACES), *WALLS[1:])


#: A helper is told what to do, and makes the devices.
HELPED = [
    record(NAMESPACES, 0x30020000, wire.MADE_BY_HELPER),
    record(Helper.kind, 0, 5, b"/bin\0"),
    record(ROOT),
]
DEVICES = record(Devices.kind, 3, 0, b"/dev\0")
BY_HELPER = plan(*HELPED, DEVICES, *WALLS)


@pytest.mark.parametrize("data", [SMALLEST, PLAIN, BY_HELPER], ids=["walled", "plain", "by a helper"])
def test_the_smallest_plan_is_accepted(data: bytes) -> None:
    assert decode(data) == ACCEPTED


@pytest.mark.parametrize(
    "mount",
    [
        record(ROOT),
        record(DIR, 0o755, 0, b"/a\0"),
        record(PROC, 0, 0, b"/proc\0"),
        record(HOSTNAME, 0, 0, b"a\0"),
        record(PIVOT),
    ],
)
def test_without_namespaces_nothing_is_mounted_or_named(mount: bytes) -> None:
    assert decode(plan(record(NAMESPACES), mount, *WALLS[1:])) == (1, "needs namespaces")
    assert decode(plan(record(NAMESPACES), mount, *WALLS[1:], base=1))[1] in (
        "needs namespaces",
        "does not belong in the base",
    )


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_without_namespaces_every_other_wall_is_needed(missing: int) -> None:
    walls = [wall for number, wall in enumerate(WALLS) if number not in (0, missing)]
    assert decode(plan(record(NAMESPACES), *walls)) == (3, "an operation that every plan needs is missing")


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        (record(MASK, 1, 0, b"/a/b\0/a\0/a\0"), "no helper does this"),
        (record(ops.Show.kind, 0, 0, b"/usr\0"), "no helper does this"),
        (record(ops.Pts.kind, 0, 0, b"/dev/pts\0"), "no helper does this"),
        (record(SCRATCH, 0o755, ops.NOEXEC, b"/tmp\0"), "no helper does this so"),
        (record(VIEW, 1, 0, b"/a\0/a\0"), "no helper does this so"),
        (record(VIEW, 0, 1 | wire.SOURCE_ALONE, b"/a\0/a\0"), "no helper does this so"),
        (record(OVERLAY, wire.OVERLAY_PRIVATE, 1, b"/a\0/a\0/\0/\0"), "no helper does this so"),
        (record(BIND, ops.READONLY, 0, b"/dev/null\0/dev/null\0"), "no helper does this so"),
    ],
)
def test_a_helper_is_asked_for_nothing_that_it_cannot_do(mount: bytes, reason: str) -> None:
    assert decode(plan(*HELPED, DEVICES, mount, *WALLS), 3) == (4, reason)


def test_who_executes_a_plan_is_said_by_its_first_operation_alone() -> None:
    told = record(Helper.kind, 0, 5, b"/bin\0")
    assert decode(plan(FIRST[0], told, record(ROOT), *WALLS)) == (1, "only for a helper")
    assert decode(plan(FIRST[0], record(ROOT), DEVICES, *WALLS)) == (2, "only for a helper")
    for missing in (1, 3):
        parts = [part for number, part in enumerate([*HELPED, DEVICES]) if number != missing]
        assert decode(plan(*parts, *WALLS))[1] == "a helper needs its arguments, and makes no base"
    for first in (
        (0x30020000, wire.MADE_BY_HELPER | wire.MAPS_EVERY_ID),
        (0, wire.MADE_BY_HELPER),
        (0x30020000, wire.MADE_BY_HELPER | 16),
        (0x70020000, wire.MADE_BY_HELPER | wire.JOINS_NETWORK),
        (0x70020000, wire.MADE_BY_HELPER | wire.FEW_MEMBERSHIPS),
    ):
        changed = plan(record(NAMESPACES, *first), *HELPED[1:], DEVICES, *WALLS)
        assert decode(changed)[0] in (0, 2), first
    for words in (b"", b"bin\0", b"/bin"):
        changed = plan(HELPED[0], record(Helper.kind, 0, len(words), words), HELPED[2], DEVICES, *WALLS)
        assert decode(changed) == (1, "not a program and its arguments")


OWN = (0, 1000, 1)
RANGE = (1, 100000, 65535)
Row = tuple[int, int, int]


def mapping(
    users: tuple[Row, ...], groups: tuple[Row, ...], *, keep: int = 0, flags: int = 0, cut: int = 0
) -> bytes:
    """A plan with these rows of ids, and with root that keeps these capabilities."""
    rows = b"".join(struct.pack("=III", *row) for row in (*users, *groups))
    counts = len(users) << wire.USER_ROWS_AT | len(groups) << wire.GROUP_ROWS_AT
    first = record(NAMESPACES, 0x70020000, flags | counts, rows[: len(rows) - cut])
    return plan(first, record(ROOT), WALLS[0], record(PRIVILEGES, keep), *WALLS[2:])


class TestIds:
    def test_rows_of_users_and_groups_are_accepted(self) -> None:
        assert decode(mapping((OWN,), (OWN,))) == ACCEPTED
        assert decode(mapping((OWN, RANGE), (OWN,))) == ACCEPTED
        eight = tuple((i * 2, 1000 + i * 2, 2) for i in range(wire.MOST_ID_ROWS))
        assert decode(mapping(eight, eight, keep=wire.KEEPABLE)) == ACCEPTED
        last = wire.NO_ID - 1
        assert decode(mapping(((last, last, 1),), ((0, 0, wire.NO_ID),))) == ACCEPTED

    def test_there_are_at_most_eight(self) -> None:
        nine = tuple((i, 1000 + i, 1) for i in range(wire.MOST_ID_ROWS + 1))
        assert decode(mapping(nine, (OWN,))) == decode(mapping((OWN,), nine)) == (0, "too many rows of ids")

    def test_users_and_groups_are_mapped_together(self) -> None:
        for data in (mapping((OWN,), ()), mapping((), (OWN,))):
            assert decode(data) == (0, "users and groups are mapped together")

    def test_they_are_all_in_the_record(self) -> None:
        assert decode(mapping((OWN, RANGE), (OWN, RANGE), cut=8)) == (0, "rows longer than their record")
        assert decode(mapping((OWN,), (OWN,), cut=24)) == (0, "rows longer than their record")

    @pytest.mark.parametrize(
        "row",
        [
            (0, 0, 0),
            (0, wire.NO_ID, 1),
            (wire.NO_ID, 0, 1),
            (1, 0, wire.NO_ID),
            (0, 1, wire.NO_ID),
            (0x80000000, 0, 0x80000000),
            (0, 0xFFFFFFF0, 0x10),
            (wire.NO_ID, wire.NO_ID, wire.NO_ID),
        ],
    )
    def test_no_row_goes_beyond_the_last_id(self, row: Row) -> None:
        assert decode(mapping((row,), (OWN,))) == decode(mapping((OWN,), (row,))) == (0, "not a range of ids")

    @pytest.mark.parametrize(
        "other", [OWN, (0, 5, 1), (5, 1000, 1), (5, 999, 2), (5, 999, 10), (0, 5, 100), (5, 1000, 0xFFFF0000)]
    )
    def test_no_id_is_mapped_twice(self, other: Row) -> None:
        for rows in ((OWN, other), (other, OWN)):
            assert decode(mapping(rows, (OWN,))) == (0, "an id is mapped twice")
            assert decode(mapping((OWN,), rows)) == (0, "an id is mapped twice")

    def test_rows_are_not_for_every_id_nor_without_namespaces(self) -> None:
        assert decode(mapping((OWN,), (OWN,), flags=wire.MAPS_EVERY_ID)) == (0, "no namespace for these ids")
        counts = 1 << wire.USER_ROWS_AT | 1 << wire.GROUP_ROWS_AT
        plain = record(NAMESPACES, 0, counts, struct.pack("=6I", *OWN, *OWN))
        assert decode(plan(plain, *WALLS[1:])) == (0, "no namespace for these ids")

    def test_no_helper_maps_them(self) -> None:
        counts = 1 << wire.USER_ROWS_AT | 1 << wire.GROUP_ROWS_AT
        rows = struct.pack("=6I", *OWN, *OWN)
        first = record(NAMESPACES, 0x30020000, wire.MADE_BY_HELPER | counts, rows)
        assert decode(plan(first, *HELPED[1:], DEVICES, *WALLS)) == (0, "no helper does this so")


class TestKeptCapabilities:
    @pytest.mark.parametrize("number", range(64))
    def test_seven_can_be_kept_and_no_other(self, number: int) -> None:
        keepable = number in ops.CAPABILITIES.values()
        found = decode(mapping((OWN, RANGE), (OWN, RANGE), keep=1 << number | 1 << 5))
        assert found == (ACCEPTED if keepable else (3, "a capability that no program keeps"))

    @pytest.mark.parametrize("number", [6, 7])
    def test_who_may_change_ids_must_be_killable(self, number: int) -> None:
        found = decode(mapping((OWN,), (OWN,), keep=1 << number))
        assert found == (3, "programs of other users could not be ended")

    def test_they_need_root_inside(self) -> None:
        refused = (3, "no root inside that could keep them")
        assert decode(mapping((RANGE,), (OWN,), keep=1)) == refused
        assert decode(mapping((OWN,), (RANGE,), keep=1)) == refused
        assert decode(mapping((), (), keep=1)) == refused
        assert decode(mapping((), (), keep=1, flags=wire.MAPS_EVERY_ID)) == refused
        assert decode(plan(record(NAMESPACES), record(PRIVILEGES, 1), *WALLS[2:]))[1] == refused[1]

    def test_a_plan_that_begins_with_them_is_refused(self) -> None:
        assert decode(plan(record(PRIVILEGES, 1, 0xFF << 32), *ROOTED, *WALLS))[0] == 0

    def test_no_helper_keeps_any(self) -> None:
        data = plan(*HELPED, DEVICES, WALLS[0], record(PRIVILEGES, 1), *WALLS[2:])
        assert decode(data) == (5, "no helper does this so")


def test_a_network_is_joined_by_a_descriptor_that_was_passed() -> None:
    joining = plan(record(NAMESPACES, 0x70020000, wire.JOINS_NETWORK), record(ROOT), *WALLS)
    assert decode(joining, 1) == ACCEPTED
    assert decode(joining, 0) == (0, "names a descriptor that was not passed")
    without = plan(record(NAMESPACES, 0x30020000, wire.JOINS_NETWORK), record(ROOT), *WALLS)
    assert decode(without, 1) == (0, "no network to join")


def test_memberships_are_limited_in_a_network_of_its_own() -> None:
    def limiting(flags: int) -> tuple[int, str]:
        return decode(plan(record(NAMESPACES, flags, wire.FEW_MEMBERSHIPS), record(ROOT), *WALLS))

    assert limiting(0x70020000) == ACCEPTED
    assert limiting(0x30020000) == (0, "no network of its own to limit memberships in")


def test_a_right_is_granted_to_a_descriptor_that_was_passed() -> None:
    def granting(b: int) -> bytes:
        return plan(record(NAMESPACES), *WALLS[1:3], record(GRANT, 1, b, b"/a\0"), WALLS[3])

    assert decode(granting(1), 1) == decode(granting(1 | wire.GRANT_GATE), 1) == ACCEPTED
    for number in (2, 2 | wire.GRANT_GATE, 1 << 33):
        assert decode(granting(number), 1) == (3, "names a descriptor that was not passed")


def test_a_port_is_granted_with_rights_of_a_port() -> None:
    def granting(rights: int, port: int) -> bytes:
        return plan(*ROOTED, *WALLS[:3], record(PORT, rights, port), WALLS[3])

    assert decode(granting(2, 1)) == decode(granting(3, 65535)) == ACCEPTED
    for rights in (0, 4, 1 << 32):
        assert decode(granting(rights, 443)) == (5, "not rights of a port")
    for port in (0, 65536, 1 << 63):
        assert decode(granting(2, port)) == (5, "not a port")


def test_an_observer_needs_memory_that_was_passed_and_a_filter() -> None:
    def observing(how: int, length: int, *more: bytes, first: bytes = FIRST[0]) -> bytes:
        return plan(
            first, record(ROOT), *WALLS[:3], record(OBSERVE, how, length, bytes(length)), *more, WALLS[3]
        )

    assert decode(observing(1, 8), 1) == decode(observing(2, 64), 1) == ACCEPTED
    assert decode(observing(1, 8), 0) == (5, "names a descriptor that was not passed")
    for how in (0, 3, 1 << 32):
        assert decode(observing(how, 8), 1) == (5, "not a way to observe")
    for length in (0, 7, 8 * 4097):
        assert decode(observing(1, length), 1) == (5, "not a filter program")
    assert decode(observing(1, 8, record(OBSERVE, 1, 8, bytes(8))), 1) == (6, "given twice")
    joining = record(NAMESPACES, 0x70020000, wire.JOINS_NETWORK)
    assert decode(observing(1, 8, first=joining), 2) == (7, "two operations need the last descriptor")


@pytest.fixture
def policies(workspace: Path, tmp_path: Path) -> list[Policy]:
    (tmp_path / "data").mkdir()
    (workspace / ".vscode").mkdir()
    rw = {"path": str(workspace), "mode": "rw"}
    return [
        Policy(),
        Policy(profile="dev"),
        Policy(net="open"),
        Policy(workspace=str(workspace), read=[str(tmp_path / "data")]),
        Policy(workspace=rw, protect=[".vscode"], write=[str(tmp_path / "data")], limits={"files": 99}),
        Policy(workspace=str(workspace), deny=[str(workspace / "a/b"), "/usr/bin/env"], exec=["/usr/bin/*"]),
        Policy(limits={"disk": "1M"}),
        Policy(backend="landlock", accept=["files", "processes", "devices"], read=[str(tmp_path / "data")]),
        *(
            [Policy(backend="bwrap", workspace=str(workspace), write=[str(workspace / ".vscode")])]
            if host(helpers=True).has("bwrap.overlay")
            else []
        ),
    ]


def compiled(policy: Policy) -> ops.Plan:
    prepared = prepare.prepare(policy)
    prepared.close(discard=True)
    return prepared.plan


def test_every_plan_that_is_compiled_is_accepted(policies: list[Policy]) -> None:
    for policy in policies:
        assert decode(compiled(policy).encoded, 200) == ACCEPTED
    assert decode(observed(compiled(policies[1]), everything=True).encoded, 200) == ACCEPTED


class TestTheWhole:
    @pytest.mark.parametrize("length", [0, 1, 8, 23])
    def test_less_than_a_header_is_no_plan(self, length: int) -> None:
        assert decode(SMALLEST[:length]) == (0, "not a plan")

    def test_another_magic_is_no_plan(self) -> None:
        assert decode(b"STKPLAN1" + SMALLEST[8:])[1] == "not a plan"

    @pytest.mark.parametrize("change", [-8, -1, 1, 8])
    def test_a_size_that_is_not_the_size_is_refused(self, change: int) -> None:
        assert decode(plan(*ROOTED, *WALLS, size=len(SMALLEST) + change))[1] == "not a plan"

    @pytest.mark.parametrize("count", [0, 16385, 0xFFFFFFFF])
    def test_an_impossible_count_is_refused(self, count: int) -> None:
        assert decode(plan(*ROOTED, *WALLS, count=count))[1] == "not a plan"

    def test_a_base_as_large_as_the_plan_is_refused(self) -> None:
        assert decode(plan(*ROOTED, *WALLS, base=6))[1] == "not a plan"

    def test_more_than_sixteen_mebibytes_are_refused(self) -> None:
        filler = [record(FILE, 0o444, 1 << 20, b"/f%d\0" % n + bytes(1 << 20)) for n in range(17)]
        assert decode(plan(*ROOTED, *filler, *WALLS))[1] == "not a plan"

    def test_a_plan_cut_short_anywhere_is_refused(self) -> None:
        for length in range(len(SMALLEST)):
            cut = SMALLEST[:length]
            assert decode(cut) != ACCEPTED
            if length >= HEADER.size:
                fitting = cut[:8] + struct.pack("=I", length) + cut[12:]
                assert decode(fitting) != ACCEPTED, length

    def test_bytes_after_the_last_record_are_refused(self) -> None:
        assert decode(plan(*ROOTED, *WALLS, bytes(24), count=6)) == (6, "bytes after the last record")

    @pytest.mark.parametrize("missing", range(6))
    def test_a_plan_needs_each_of_the_six(self, missing: int) -> None:
        records = [*ROOTED, *WALLS]
        del records[missing]
        assert decode(plan(*records)) != ACCEPTED


class TestARecord:
    @pytest.mark.parametrize("kind", [0, wire.OP_END, 255, 0xFFFFFFFF])
    def test_an_unknown_operation_is_refused(self, kind: int) -> None:
        assert decode(with_mount(record(kind))) == (2, "unknown operation")

    @pytest.mark.parametrize("size", [0, 8, 23, 25, 28, 1 << 20, 0xFFFFFFF8])
    def test_a_wrong_size_is_refused(self, size: int) -> None:
        assert decode(with_mount(record(DIR, 0o755, 0, b"/a\0", size=size))) == (2, "wrong size")

    def test_a_string_without_an_end_is_refused(self) -> None:
        assert decode(with_mount(record(DIR, 0o755, 0, b"/aaaaaaa"))) == (2, "unterminated string")

    def test_a_missing_second_string_is_refused(self) -> None:
        assert decode(with_mount(record(LINK, 0, 0, b"/aaaaaa\0"))) == (2, "unterminated string")

    @pytest.mark.parametrize("length", [9, 1 << 20, 0xFFFFFFFFFFFFFFFF])
    def test_a_blob_longer_than_its_record_is_refused(self, length: int) -> None:
        assert (
            decode(with_mount(record(FILE, 0o444, length, b"/a\0content")))
            == (
                2,
                "blob longer than its record",
            )
            or length == 9
        )

    def test_bytes_that_belong_to_nothing_are_refused(self) -> None:
        assert decode(with_mount(record(DIR, 0o755, 0, b"/a\0" + bytes(16)))) == (2, "trailing bytes")


class TestAPath:
    @pytest.mark.parametrize(
        "path",
        [
            b"",
            b"a",
            b"./a",
            b"../a",
            b"/..",
            b"/a/..",
            b"/a/../b",
            b"/.",
            b"/a/./b",
            b"//",
            b"//a",
            b"/a//b",
            b"/a/",
            b"/" + b"x" * 256,
            b"/x" * 2049,
        ],
        ids=lambda path: path[:12].decode() or "empty",
    )
    def test_it_must_be_absolute_and_normal(self, path: bytes) -> None:
        assert decode(with_mount(record(DIR, 0o755, 0, path + b"\0"))) == (2, "not an absolute, normal path")

    @pytest.mark.parametrize("path", [b"/a", b"/a/b.c/..d", b"/...", b"/" + b"x" * 255, b"/\xff\n :,\\"])
    def test_any_other_is_fine(self, path: bytes) -> None:
        assert decode(with_mount(record(DIR, 0o755, 0, path + b"\0"))) == ACCEPTED

    def test_the_target_of_a_link_may_be_relative(self) -> None:
        assert decode(with_mount(record(LINK, 0, 0, b"/bin\0usr/bin\0"))) == ACCEPTED

    @pytest.mark.parametrize("position", range(4))
    def test_every_path_of_an_operation_is_looked_at(self, position: int) -> None:
        paths = [b"/a", b"/b", b"/c", b"/d"]
        paths[position] = b"/a/../b"
        data = b"".join(path + b"\0" for path in paths)
        assert decode(with_mount(record(OVERLAY, 0, 1, data)), 3)[1] == "not an absolute, normal path"


class TestTheOrder:
    def test_a_mount_after_the_pivot_is_refused(self) -> None:
        late = plan(*ROOTED, WALLS[0], record(DIR, 0o755, 0, b"/a\0"), *WALLS[1:])
        assert decode(late) == (3, "out of order")

    def test_a_limit_after_the_privileges_are_dropped_is_refused(self) -> None:
        assert decode(plan(*ROOTED, *WALLS[:2], record(LIMIT, 7, 9), *WALLS[2:])) == (4, "out of order")

    def test_nothing_comes_after_the_filter(self) -> None:
        grant = record(GRANT, 1, 0, b"/\0")
        assert decode(plan(*ROOTED, *WALLS, grant)) == (6, "out of order")

    def test_the_namespaces_come_first(self) -> None:
        assert decode(plan(record(ROOT), *FIRST, *WALLS)) == (1, "out of order")

    @pytest.mark.parametrize("twice", [ROOTED[0], ROOTED[1], *WALLS])
    def test_what_is_given_once_is_not_given_twice(self, twice: bytes) -> None:
        records = [*ROOTED, *WALLS]
        at = records.index(twice)
        assert decode(plan(*records[:at], twice, *records[at:])) == (at + 1, "given twice")

    def test_a_base_may_hold_files_and_host_trees(self) -> None:
        base = [record(DIR, 0o755, 0, b"/a\0"), record(BIND, 1, 0, b"/b\0/b\0")]
        assert decode(plan(*FIRST, *base, record(ROOT), *WALLS, base=2)) == ACCEPTED

    @pytest.mark.parametrize(
        "stranger",
        [record(ROOT), record(PROC, 0, 0, b"/p\0"), record(HOSTNAME, 0, 0, b"h\0"), record(KEYRING)],
    )
    def test_a_base_holds_nothing_else(self, stranger: bytes) -> None:
        found = decode(plan(*FIRST, stranger, record(ROOT), *WALLS, base=1))
        assert found == (1, "does not belong in the base")

    def test_a_base_holds_nothing_that_was_granted_to_one_sandbox(self) -> None:
        granted = record(BIND, 1, 1, b"/b\0/b\0")
        assert decode(plan(*FIRST, granted, record(ROOT), *WALLS, base=1), 1)[0] == 1


class TestDescriptors:
    @pytest.mark.parametrize(("number", "passed"), [(1, 0), (2, 1), (0xFFFFFFFFFFFFFFFF, 250)])
    def test_a_mount_cannot_name_one_that_was_not_passed(self, number: int, passed: int) -> None:
        found = decode(with_mount(record(BIND, 1, number, b"/a\0/a\0")), passed)
        assert found == (2, "names a descriptor that was not passed")

    @pytest.mark.parametrize(("number", "passed"), [(0, 3), (1, 2), (2, 3), (0xFFFFFFFFFFFFFFFE, 250)])
    def test_an_overlay_needs_three_that_were_passed(self, number: int, passed: int) -> None:
        found = decode(with_mount(record(OVERLAY, 0, number, b"/a\0/b\0/c\0/d\0")), passed)
        assert found == (2, "names descriptors that were not passed")

    def test_what_was_passed_can_be_named(self) -> None:
        assert decode(with_mount(record(BIND, 1, 2, b"/a\0/a\0")), 2) == ACCEPTED
        assert decode(with_mount(record(OVERLAY, 0, 1, b"/a\0/b\0/c\0/d\0")), 3) == ACCEPTED


class TestAMask:
    TREE = b"/a/b\0/a\0/a\0"

    def test_it_may_name_what_is_in_its_tree(self) -> None:
        assert decode(with_mount(record(MASK, 1, 0, self.TREE))) == ACCEPTED
        assert decode(with_mount(record(MASK, 1024, 1, b"/a/b/c\0/a\0/z\0")), 1) == ACCEPTED

    @pytest.mark.parametrize("data", [b"/a\0/a\0/a\0", b"/ab\0/a\0/a\0", b"/b/c\0/a\0/a\0", b"/a\0/\0/\0"])
    def test_what_is_not_in_its_tree_is_refused(self, data: bytes) -> None:
        assert decode(with_mount(record(MASK, 1, 0, data))) == (2, "not in its tree")

    @pytest.mark.parametrize("number", [0, 1025, 1 << 32, 0xFFFFFFFFFFFFFFFF])
    def test_its_number_is_in_bounds(self, number: int) -> None:
        assert decode(with_mount(record(MASK, number, 0, self.TREE))) == (2, "not a number of masks")

    def test_the_tree_that_it_is_for_names_a_number_in_bounds(self) -> None:
        assert decode(with_mount(record(VIEW, 1025, 0, b"/a\0/a\0"))) == (2, "not a number of masks")
        overlay = record(OVERLAY, 1025, 1, b"/a\0/b\0/c\0/d\0")
        assert decode(with_mount(overlay), 3) == (2, "not a number of masks")

    def test_it_cannot_name_a_descriptor_that_was_not_passed(self) -> None:
        found = decode(with_mount(record(MASK, 1, 2, self.TREE)), 1)
        assert found == (2, "names a descriptor that was not passed")

    def test_it_comes_before_the_walls_and_never_into_the_base(self) -> None:
        mask = record(MASK, 1, 0, self.TREE)
        assert decode(plan(*ROOTED, WALLS[0], mask, *WALLS[1:])) == (3, "out of order")
        assert decode(plan(*FIRST, mask, record(ROOT), *WALLS, base=1)) == (1, "does not belong in the base")


@pytest.mark.parametrize("attributes", [1, 2, 9, 1 << 20, 0xFFFFFFFF])
def test_a_writable_directory_takes_no_attribute_but_noexec(attributes: int) -> None:
    assert decode(with_mount(record(SCRATCH, 0o700, attributes, b"/a\0"))) == (2, "unknown mount attributes")
    overlay = record(OVERLAY, attributes << 32, 1, b"/a\0/b\0/c\0/d\0")
    assert decode(with_mount(overlay), 3) == (2, "unknown mount attributes")
    assert decode(with_mount(record(SCRATCH, 0o700, ops.NOEXEC, b"/a\0"))) == ACCEPTED


@pytest.mark.parametrize(("size", "inodes"), [(1, 0), (0, 1)])
def test_a_size_without_a_number_of_files_is_refused(size: int, inodes: int) -> None:
    found = decode(plan(*FIRST, record(ROOT, size, inodes), *WALLS))
    assert found == (1, "a size and a number of inodes go together")
    assert decode(plan(*FIRST, record(ROOT, 1, 1), *WALLS)) == ACCEPTED


def test_a_host_name_longer_than_the_kernels_is_refused() -> None:
    named = [*FIRST, record(HOSTNAME, 0, 0, b"h" * 65 + b"\0"), record(ROOT), *WALLS]
    assert decode(plan(*named)) == (1, "too long")


@pytest.mark.parametrize("length", [0, 7, 12, 8 * 4097])
def test_a_filter_that_is_none_is_refused(length: int) -> None:
    program = record(SECCOMP, 0, length, bytes(length + -length % 8))
    assert decode(plan(*ROOTED, *WALLS[:3], program)) == (5, "not a filter program")


class TestSentToARealGate:
    @pytest.fixture(autouse=True)
    def one_gate_before_and_after(self) -> Iterator[None]:
        stockade.run(["true"]).check()
        before = client._residents["own-network", False].pid
        yield
        stockade.run(["true"]).check()
        assert client._residents["own-network", False].pid == before, "the gate died of a bad plan"

    def answer(self, data: bytes) -> wire.Reply:
        connection = client.launch(data, ())
        try:
            reply = connection.receive()
            assert reply is not None
            return reply
        finally:
            connection.close()

    def test_a_bad_plan_is_refused_with_its_index_and_reason(self) -> None:
        reply = self.answer(with_mount(record(DIR, 0o755, 0, b"relative\0")))
        assert (reply.kind, reply.operation, reply.index) == (wire.REPLY_FAILED, "plan", 2)
        assert reply.text == "not an absolute, normal path"

    def test_random_bytes_are_refused(self) -> None:
        assert self.answer(os.urandom(5000)).text == "not a plan"

    def test_an_empty_and_an_oversized_plan_are_refused(self) -> None:
        assert self.answer(b"").kind == wire.REPLY_FAILED
        assert self.answer(bytes((16 << 20) + 1)).kind == wire.REPLY_FAILED

    def test_a_plan_without_namespaces_is_refused_by_a_gate_that_makes_them(self) -> None:
        reply = self.answer(PLAIN)
        expected = wire.REPLY_FAILED, "namespaces", "not for this gate"
        assert (reply.kind, reply.operation, reply.text) == expected

    @pytest.mark.parametrize("flags", [0x10000000, 0x30020000, 0x7E020001], ids=hex)
    def test_a_plan_with_other_namespaces_than_the_gates_is_refused(self, flags: int) -> None:
        reply = self.answer(plan(record(NAMESPACES, flags), record(ROOT), *WALLS))
        expected = wire.REPLY_FAILED, "namespaces", "not for this gate"
        assert (reply.kind, reply.operation, reply.text) == expected

    def test_a_refused_plan_has_no_side_effect(self, tmp_path: Path) -> None:
        before = Path(f"/proc/{client._residents['own-network', False].pid}/mountinfo").read_bytes()
        good = compiled(Policy()).encoded
        # The last record, the filter, is damaged: everything before it would have been executed by now.
        assert self.answer(good[:-8] + bytes(8) + good[:8]).kind == wire.REPLY_FAILED
        assert Path(f"/proc/{client._residents['own-network', False].pid}/mountinfo").read_bytes() == before


@pytest.mark.timeout(300)
def test_no_mutated_plan_makes_the_decoder_read_or_write_out_of_bounds(
    policies: list[Policy], tmp_path: Path
) -> None:
    need_program("gcc")
    # Half a minute where nothing may go untested. Who runs the decoder makes no difference: each of the two
    # users of the suite takes half of it, and a seed of its own.
    seconds = float(
        os.environ.get("STOCKADE_FUZZ_SECONDS") or (15 if os.environ.get("STOCKADE_REQUIRE") == "all" else 5)
    )
    seed = "1" if os.geteuid() == 0 else "2"
    driver = gatebuild.decoder_fuzzer(tmp_path)
    corpus = []
    encoded = [SMALLEST, *(compiled(policy).encoded for policy in policies)]
    encoded.append(egress_plan((80, 443)).encoded)
    encoded.append(mapping((OWN, RANGE), (OWN, RANGE), keep=wire.KEEPABLE, flags=wire.JOINS_NETWORK))
    rows = ((OWN, RANGE), (OWN, RANGE))
    encoded += [
        mapped.altered(compiled(policy), rows, wire.KEEPABLE, joins=False).encoded for policy in policies[:2]
    ]
    for number, data in enumerate(encoded):
        corpus.append(tmp_path / f"seed-{number}")
        corpus[-1].write_bytes(data)
    done = subprocess.run(
        [driver, str(seconds), seed, *corpus], capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stderr
    tries, accepted = map(int, done.stdout.split())
    # If hardly anything or almost everything were accepted, the mutations would not reach the checks.
    assert tries > 1000 * seconds and 0.02 < accepted / tries < 0.9, done.stdout
