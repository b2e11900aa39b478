"""Ids of a plan: root inside is the caller, keeps what the plan names, and starts programs as other ids."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.functions import WarmPython
from stockade.gate import client, wire
from stockade.gate import operations as ops
from stockade.linux import subordinate_ids
from support import leaks
from support.mapped import KEPT, mapped, own_rows, programs_as, range_rows
from support.means import applies, need

NOTHING = "0" * 16
STATUS = "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs)' /proc/self/status"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A sandbox of root with the ids of the plan."""
    with mapped():
        found = Sandbox(Policy())
        found.open()
    try:
        yield found
    finally:
        found.close()


def status(box: Sandbox) -> dict[str, str]:
    """What the kernel says of a program inside."""
    lines = box.run(["sh", "-c", STATUS]).check().text.splitlines()
    return {name: " ".join(words.split()) for name, words in (line.split(":", 1) for line in lines)}


def test_root_inside_is_the_caller_and_the_maps_are_those_of_the_plan(box: Sandbox) -> None:
    assert box.run(["id", "-u"]).check().text == box.run(["id", "-g"]).check().text == "0\n"
    for file, rows in zip(("uid_map", "gid_map"), range_rows(), strict=True):
        lines = box.run(["cat", f"/proc/self/{file}"]).check().text.splitlines()
        assert len(lines) == len(rows) == 2
    assert box._box is not None
    assert box._box.evidence.uid_map == ", ".join(" ".join(map(str, row)) for row in range_rows()[0])


def test_root_keeps_exactly_the_capabilities_of_the_plan_over_an_execve(box: Sandbox) -> None:
    found = status(box)
    assert {name: found[name] for name in ("CapPrm", "CapEff", "CapBnd")} == dict.fromkeys(
        ("CapPrm", "CapEff", "CapBnd"), KEPT
    )
    assert (found["CapInh"], found["CapAmb"], found["NoNewPrivs"]) == (NOTHING, NOTHING, "1")
    assert box._box is not None
    assert box._box.evidence.capabilities == {
        "CapInh": NOTHING, "CapPrm": KEPT, "CapEff": KEPT, "CapBnd": KEPT, "CapAmb": NOTHING,
    }  # fmt: skip


def test_root_that_keeps_nothing_has_nothing() -> None:
    with mapped(keep=0), Sandbox(Policy()) as box:
        found = status(box)
    assert {found[name] for name in found if name.startswith("Cap")} == {NOTHING}


def test_a_part_of_the_capabilities_can_be_kept() -> None:
    with mapped(keep=1), Sandbox(Policy()) as box:  # CHOWN
        assert status(box)["CapEff"] == f"{1:016x}"
        assert (
            box.run(["sh", "-c", "touch /tmp/a && chown 7:8 /tmp/a && stat -c %u:%g /tmp/a"]).text == "7:8\n"
        )


def test_the_plan_says_in_words_what_is_mapped_and_kept(box: Sandbox) -> None:
    text = "\n".join(op.describe() for op in _plan(box))
    assert f"0 to {os.geteuid()}, 1-65535 to" in text
    assert "but CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID over mapped ids" in text


def _plan(box: Sandbox) -> tuple[ops.Op, ...]:
    assert box._prepared is not None
    return box._prepared.plan.ops


def test_files_can_be_given_to_mapped_ids_and_to_no_others(box: Sandbox) -> None:
    script = """
import os
open("/tmp/own", "w").close()
for uid, gid in ((1, 1), (1000, 0), (65535, 65535), (65536, 0)):
    try:
        os.chown("/tmp/own", uid, gid)
        print(uid, gid, os.stat("/tmp/own").st_uid)
    except OSError as error:
        print(uid, gid, error.strerror)
"""
    assert box.run(["/usr/bin/python3", "-c", script]).check().text.splitlines() == [
        "1 1 1", "1000 0 1000", "65535 65535 65535", "65536 0 Invalid argument",
    ]  # fmt: skip


def test_root_that_becomes_another_user_keeps_nothing_of_it(box: Sandbox) -> None:
    script = """
import os
os.setgroups([])
os.setresgid(7, 7, 7)
os.setresuid(7, 7, 7)
for line in open("/proc/self/status"):
    if line.startswith(("CapPrm", "CapEff")): print(line.split()[1])
try:
    os.setuid(0)
except PermissionError:
    print("for good")
"""
    assert box.run(["/usr/bin/python3", "-c", script]).check().text.splitlines() == [
        NOTHING, NOTHING, "for good",
    ]  # fmt: skip


class TestAProgramOfAnotherUser:
    def test_it_has_these_ids_no_groups_and_no_capability(self, box: Sandbox) -> None:
        with programs_as(1000, 1001):
            found = status(box)
        assert (found["Uid"], found["Gid"], found["Groups"]) == (
            "1000 " * 3 + "1000",
            "1001 " * 3 + "1001",
            "",
        )
        assert (found["CapPrm"], found["CapEff"]) == (NOTHING, NOTHING)

    def test_the_group_of_a_user_alone_has_the_same_number(self, box: Sandbox) -> None:
        with programs_as(1000):
            assert status(box)["Gid"].split()[0] == "1000"

    def test_it_begins_in_a_directory_that_only_root_may_enter(self, box: Sandbox) -> None:
        box.run(["sh", "-c", "mkdir -p /tmp/closed && chmod 700 /tmp/closed"]).check()
        with programs_as(1000):
            assert box.run(["pwd"], cwd="/tmp/closed").check().text == "/tmp/closed\n"
            assert box.run(["ls", "/tmp/closed"]).exit_code == 2

    def test_it_can_open_its_streams_again(self, box: Sandbox) -> None:
        with programs_as(1000):
            done = box.run(
                ["sh", "-c", "echo out >/dev/stdout; echo err >/dev/stderr; cat /dev/stdin"], input=b"in"
            )
        assert (done.stdout, done.stderr) == (b"out\nin", b"err\n")

    def test_its_terminal_is_its_own(self, box: Sandbox) -> None:
        with (
            programs_as(1000),
            box.start(["sh", "-c", "echo x >$(tty); stat -c %u $(tty)"], pty=True) as process,
        ):
            process.wait(timeout=30)
            assert b"1000" in process.stdout.read()

    def test_a_shell_can_be_another_users(self, box: Sandbox) -> None:
        with programs_as(1000), box.shell() as shell:
            assert shell.run("id -u").stdout == b"1000\n"
            assert shell.run("id -g").stdout == b"1000\n"

    def test_an_interpreter_can_be_another_users(self, box: Sandbox) -> None:
        with programs_as(1000), box.python() as python:
            assert python.run("import os; print(os.getuid())").stdout == b"1000\n"

    @pytest.mark.parametrize(("uid", "gid"), [(65536, 0), (0, 65536), (4294967294, None)])
    def test_an_id_that_is_not_mapped_is_refused(self, box: Sandbox, uid: int, gid: int | None) -> None:
        with programs_as(uid, gid):
            done = box.run(["true"])
        assert (done.outcome, done.exit_code) == ("setup-failed", 125)
        assert done.reason is not None and done.reason.startswith("no such id inside")

    def test_a_shell_of_an_id_that_is_not_mapped_is_refused(self, box: Sandbox) -> None:
        with programs_as(65536), box.shell() as shell:
            done = shell.run("true")
        assert (done.outcome, done.exit_code) == ("setup-failed", 125)
        assert done.reason is not None and done.reason.startswith("no such id inside")

    def test_a_group_needs_a_user(self) -> None:
        with pytest.raises(PolicyError, match="a group without a user"):
            client.Program(argv=["true"], env={}, cwd="/", grace=0, gid=5)

    @pytest.mark.parametrize("uid", [-1, wire.NO_ID, 1 << 40])
    def test_what_is_no_id_is_refused(self, uid: int) -> None:
        with pytest.raises(PolicyError, match="is not an id"):
            client.Program(argv=["true"], env={}, cwd="/", grace=0, uid=uid)

    def test_a_sandbox_without_the_right_starts_none(self) -> None:
        with Sandbox(Policy()) as plain, programs_as(1000):
            done = plain.run(["true"])
        assert done.outcome == "setup-failed"
        assert done.reason is not None and "can run as user 1000" in done.reason

    def test_where_only_the_caller_is_mapped_it_can_be_root(self) -> None:
        with mapped(own_rows()), Sandbox(Policy()) as box:
            with programs_as(0):
                assert box.run(["id", "-u"]).check().text == "0\n"
            with programs_as(1):
                assert box.run(["true"]).outcome == "setup-failed"
            done = box.run(["sh", "-c", "touch /tmp/a; chown 1 /tmp/a"])
            assert done.exit_code == 1 and b"Invalid argument" in done.stderr


class TestItsEnd:
    STAYS = "trap '' TERM HUP INT; echo go; sleep 1000 & while :; do sleep 1; done"

    def test_its_time_ends_it(self, box: Sandbox) -> None:
        with programs_as(1000):
            done = box.run(["sh", "-c", self.STAYS], timeout=0.3, grace=0.1)
        assert done.outcome == "timed-out"
        assert "sleep" not in box.run(["ps", "-e", "-o", "args"]).text

    def test_it_is_signalled_and_killed_on_request(self, box: Sandbox) -> None:
        with (
            programs_as(1000),
            box.start(
                ["sh", "-c", "trap 'echo heard' USR1; echo go; while :; do sleep 1000 & wait; done"]
            ) as run,
        ):
            assert run.stdout.readline() == b"go\n"
            run.signal(signal.SIGUSR1)
            assert run.stdout.readline() == b"heard\n"
            run.kill()
            assert run.wait(timeout=30).outcome == "cancelled"
            assert "sleep" not in box.run(["ps", "-e", "-o", "args"]).text

    def test_it_cannot_end_root_s_programs_but_root_can_end_it(self, box: Sandbox) -> None:
        with box.start(["sleep", "1000"]) as roots:
            with programs_as(1000):
                assert box.run(["pkill", "-x", "sleep"]).exit_code != 0
                assert roots.poll() is None
                others = box.start(["sleep", "999"])
            box.run(["pkill", "-f", "sleep 999"]).check()
            assert others.wait(timeout=30).signal == signal.SIGTERM
            others.close()
            roots.kill()

    def test_closing_the_sandbox_ends_it(self, tmp_path: Path) -> None:
        word = f"stays-{tmp_path.name}"
        with mapped(), Sandbox(Policy()) as box, programs_as(1000):
            process = box.start(["sh", "-c", f"{self.STAYS} # {word}"])
            assert process.stdout.readline() == b"go\n"
            assert _found(word)
        process.close()
        assert leaks.settled(lambda: list(map(str, _found(word)))) == []

    @pytest.mark.usefixtures("swept")
    def test_nothing_outlives_a_killed_supervisor(self, tmp_path: Path) -> None:
        word = f"outlives-{tmp_path.name}"
        script = f"""
import os, sys, time
from stockade import Policy, Sandbox
from support.mapped import mapped, programs_as
with mapped():
    box = Sandbox(Policy())
    box.open()
with programs_as(1000):
    process = box.start(["sh", "-c", {self.STAYS!r} + " # " + os.environ["WORD"]])
print(process.stdout.readline().decode(), end="", flush=True)
time.sleep(1000)
"""
        environ = {**os.environ, "WORD": word, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as supervisor:
            assert supervisor.stdout is not None
            assert supervisor.stdout.readline() == b"go\n"
            assert _found(word)
            supervisor.kill()
        assert leaks.settled(lambda: list(map(str, _found(word))), 10) == []


def _found(word: str) -> list[int]:
    """Processes of the host with this word among their arguments, whoever their user is."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def test_a_sandbox_of_another_kind_gets_no_process_that_was_made_for_these_ids() -> None:
    """The resident makes the next sandbox ahead, as the last ones were; each change of kind is noticed."""
    for _ in range(3):
        for keep, seen in ((wire.KEEPABLE, KEPT), (1, f"{1:016x}"), (0, NOTHING)):
            with mapped(own_rows(), keep=keep):
                done = stockade.run(
                    ["sh", "-c", "grep CapEff /proc/self/status; cat /proc/self/uid_map"]
                ).check()
            assert done.text.split()[1] == seen
            assert done.text.split()[2:4] == ["0", str(os.geteuid())]
        assert stockade.run(["id", "-u"]).check().text == f"{os.geteuid()}\n"


class TestSubordinateIds:
    @pytest.fixture(autouse=True)
    def an_ordinary_user(self) -> None:
        applies(os.geteuid() != 0, "root maps ids itself")
        reason = subordinate_ids.why_none(os.geteuid())
        need(not reason, f"no subordinate ids: {reason}")

    def test_the_resident_has_the_caller_and_the_range_as_they_are(self, box: Sandbox) -> None:
        assert box._box is not None
        pid = box._box.connection.resident.pid
        rows = [line.split() for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines()]
        assert all(inside == outside for inside, outside, _ in rows)
        assert [rows[0][0], rows[0][2]] == [str(os.geteuid()), "1"]
        assert [(int(row[0]), int(row[2])) for row in rows[1:]] == subordinate_ids.ranges(
            subordinate_ids.USERS, os.geteuid()
        )

    def test_a_file_inside_belongs_to_the_subordinate_id_outside(self, box: Sandbox) -> None:
        first, _ = subordinate_ids.ranges(subordinate_ids.USERS, os.geteuid())[0]
        assert box._box is not None
        root, *_ = box._box.roots()
        try:
            box.run(["sh", "-c", "touch /tmp/seen; chown 5:5 /tmp/seen"]).check()
            assert os.stat("tmp/seen", dir_fd=root).st_uid == first + 4
        finally:
            os.close(root)

    def test_a_program_that_maps_nothing_is_an_error_that_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake = tmp_path / "newuidmap"
        fake.write_text("#!/bin/sh\necho newuidmap: not today >&2\nexit 1\n")
        fake.chmod(0o755)
        client.shutdown()
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with mapped(), pytest.raises(SetupError, match="not today"):
            stockade.run(["true"])
        assert client.resident_pids() == set()

    def test_warm_python_has_them_as_well(self) -> None:
        with mapped(), WarmPython() as python, python.sandbox() as warm:
            assert warm.run(["id", "-u"]).check().text == "0\n"
            with programs_as(1000):
                assert warm.run(["id", "-u"]).check().text == "1000\n"


def test_the_ranges_of_a_user_are_those_of_its_name_and_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "subuid"
    uid, name = os.geteuid(), pwd.getpwuid(os.geteuid()).pw_name
    file.write_text(
        f"other:1000000:65536\n{name}:200000:1000\nbad\n{uid}:300000:5\n{name}:200500:1000\n{name}:x:1\n"
    )
    assert subordinate_ids.ranges(str(file), uid) == [(200000, 1000), (300000, 5)]
    assert subordinate_ids.ranges(str(tmp_path / "missing"), uid) == []
    for line in (f"{name}:0:65536\n", f"{name}:4294967295:1\n", f"{name}:1:0\n"):
        file.write_text(line)
        assert subordinate_ids.ranges(str(file), uid) == [], line


def test_a_user_or_group_that_newuidmap_refuses_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subordinate_ids.why_none(4294967200) == "the user 4294967200 has no name"
    monkeypatch.setattr(os, "getegid", lambda: 4242)
    assert "another group" in subordinate_ids.why_none(os.geteuid())
