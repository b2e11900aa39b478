"""File workers: whose rights they have, what they can reach, and when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import AsyncSandbox, DeniedError, NotFoundError, PolicyError, StockadeError
from stockade.errors import SetupError
from stockade.linux import process_rights
from stockade.resolve.environment import KEPT
from stockade.sandbox import file_worker
from stockade.sandbox.file_worker import FileWorker, FileWorkers
from stockade.sandbox.file_worker_calls import CALLS
from stockade.workspace.files.identity_files import IdentityFiles, Permission
from support.living_files import LivingFiles, living_files

SIX = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LivingFiles]:
    """A sandbox with workers."""
    yield from living_files(tmp_path)


def status_of(worker: FileWorker) -> dict[str, str]:
    """What the kernel says about the process of a worker."""
    (process,) = worker._idle
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def write(files: LivingFiles, path: str, content: bytes = b"text", uid: int | None = None) -> None:
    """Write a file through a worker."""
    worker = files.worker(uid, uid)

    async def steps() -> None:
        (new,) = await worker.begin([(path, Permission())])
        try:
            os.write(new.descriptor, content)
            await worker.finish([new])
        finally:
            os.close(new.descriptor)

    files.run(steps())


def test_a_worker_has_the_capabilities_of_programs_and_no_others(files: LivingFiles) -> None:
    worker = files.worker()
    files.run(worker.info(["/"]))
    found = status_of(worker)
    assert {found[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {f"{KEPT:016x}"}
    assert {found[name] for name in ("CapInh", "CapAmb")} == {f"{0:016x}"}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")


def test_a_worker_of_another_user_has_no_capabilities_and_no_groups(files: LivingFiles) -> None:
    files.several_ids()
    worker = files.worker(1000, 100)
    files.run(worker.info(["/"]))
    found = status_of(worker)
    assert {found[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {f"{0:016x}"}
    assert found["Groups"] == ""
    outside = files.ids.uid_outside(1000), files.ids.gid_outside(100)
    assert (int(found["Uid"].split()[1]), int(found["Gid"].split()[1])) == outside


@pytest.mark.parametrize("step", ["keep_capabilities", "bound_capabilities"])
def test_a_worker_that_did_not_give_up_its_rights_is_not_used(
    files: LivingFiles, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(process_rights, step, lambda mask: None)
    with pytest.raises(SetupError):
        files.run(files.worker().info(["/"]))


def test_a_worker_keeps_two_descriptors_and_three_that_lead_nowhere(files: LivingFiles) -> None:
    worker = files.worker()
    files.run(worker.info(["/"]))
    kept = files.run(worker.call("test-descriptors"))
    assert kept[:3] == ["/dev/null"] * 3
    # The socket, the sandbox's root, and the directory that is being listed.
    assert [name.partition(":")[0] for name in kept[3:5]] == ["socket", "/"]
    assert len(kept) == 6 and kept[5].startswith("/proc/")


def _descriptors(files: IdentityFiles, _: tuple[int, ...]) -> object:
    names = sorted(map(int, os.listdir("/proc/self/fd")))
    found = []
    for name in names:
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the directory that was listed
            found.append(f"/proc/{os.getpid()}/fd")
    return found


CALLS["test-descriptors"] = _descriptors
CALLS["test-execute"] = lambda files, _: os.execv("/bin/true", ["true"])
CALLS["test-wait"] = lambda files, _, seconds: time.sleep(seconds)
CALLS["test-fail"] = lambda files, _: {}["nothing"]
CALLS["test-long"] = lambda files, _, size: b"x" * size


def test_a_worker_cannot_execute_anything(files: LivingFiles) -> None:
    with pytest.raises(DeniedError):
        files.run(files.worker().call("test-execute"))


def test_files_of_a_worker_belong_to_its_user(files: LivingFiles) -> None:
    files.several_ids()
    write(files, "/tmp/mine", uid=1234)
    assert files.sh("stat -c %u:%g /tmp/mine") == "1234:1234\n"


def test_a_user_may_not_change_what_belongs_to_another(files: LivingFiles) -> None:
    files.several_ids()
    write(files, "/workspace/roots")
    with pytest.raises(DeniedError):
        write(files, "/workspace/roots", uid=1234)
    with pytest.raises(DeniedError):
        files.run(files.worker(1234, 1234).set_permissions([("/workspace/roots", Permission(0o777))]))


def test_root_inside_moves_a_file_into_a_directory_that_is_closed_to_all(files: LivingFiles) -> None:
    files.sh("mkdir -m 644 /workspace/closed; echo 1 > /workspace/file; chown 0:0 /workspace/closed")
    files.run(files.worker().move([("file", "closed/file")]))
    assert files.sh("cat /workspace/closed/file") == "1\n"


def test_root_inside_gives_a_file_to_a_user_by_name(files: LivingFiles) -> None:
    files.several_ids()
    write(files, "/workspace/given")
    files.run(files.worker().set_permissions([("given", Permission(0o640, "nobody", "nogroup"))]))
    assert files.sh("stat -c '%U:%G %a' /workspace/given") == "nobody:nogroup 640\n"
    (facts,) = files.run(files.worker().info(["given"]))
    assert (facts.owner, facts.group, facts.mode) == ("nobody", "nogroup", 0o640)


def test_an_id_that_the_sandbox_lacks_is_an_error_that_says_what_to_install(files: LivingFiles) -> None:
    write(files, "/workspace/given")
    with pytest.raises(DeniedError, match="/etc/subuid"):
        files.run(files.worker().set_permissions([("given", Permission(None, "70000", ""))]))
    with pytest.raises(PolicyError, match="/etc/subuid"):
        files.run(files.worker(70000, 70000).info(["/"]))


def test_a_number_that_is_no_id_is_an_error(files: LivingFiles) -> None:
    for uid, gid in ((-1, 0), (0, 1 << 32), (0xFFFFFFFF, 0)):
        with pytest.raises(PolicyError, match="must be a number"):
            files.worker(uid, gid)


def test_an_unknown_name_is_an_error(files: LivingFiles) -> None:
    write(files, "/workspace/given")
    with pytest.raises(PolicyError, match="owner = 'nemo'"):
        files.run(files.worker().set_permissions([("given", Permission(None, "nemo", ""))]))


def test_relative_paths_begin_where_commands_start_and_home_is_theirs(files: LivingFiles) -> None:
    write(files, "relative")
    write(files, "~/at-home")
    assert files.sh("ls; ls ~") == "relative\nat-home\n"


def test_an_unfinished_file_leaves_nothing(files: LivingFiles) -> None:
    (new,) = files.run(files.worker().begin([("/workspace/deep/er/file", Permission())]))
    os.write(new.descriptor, b"half")
    files.run(files.worker().discard([new]))
    os.close(new.descriptor)
    assert files.sh("find /workspace -mindepth 1") == ""


def test_if_one_of_several_files_cannot_be_opened_none_is(files: LivingFiles) -> None:
    with pytest.raises(DeniedError):
        files.run(files.worker().begin([("/workspace/good", Permission()), ("/usr/bad", Permission())]))
    assert files.sh("ls -A") == ""


def test_replace_keeps_mode_and_owner(files: LivingFiles) -> None:
    files.sh("printf 'a b a' > f; chmod 751 f")
    if files.ids.several:
        files.sh("chown 77:78 f")
    assert files.run(files.worker().replace([("f", "a", "long")])) == [2]
    expected = "77:78" if files.ids.several else "0:0"
    assert files.sh("cat f; stat -c ' %a %u:%g' f") == f"long b long 751 {expected}\n"


def test_a_file_moved_to_another_mount_keeps_its_owner(files: LivingFiles) -> None:
    files.several_ids()
    files.sh("mkdir /tmp/d; echo 1 > /tmp/d/f; chown -R 77:78 /tmp/d")
    files.run(files.worker().move([("/tmp/d", "/workspace/d")]))
    assert files.sh("stat -c %u:%g /workspace/d /workspace/d/f; ls /tmp") == "77:78\n77:78\n"


def test_names_that_are_not_utf_8_go_through(files: LivingFiles) -> None:
    files.sh(r"touch $(printf '/tmp/a\377b')")
    (facts,) = files.run(files.worker().list_directory("/tmp", 1))
    assert facts.path == b"/tmp/a\xffb"
    files.run(files.worker().remove_files([os.fsdecode(facts.path)]))
    assert files.sh("ls /tmp") == ""


def test_an_answer_of_many_megabytes_arrives(files: LivingFiles) -> None:
    assert len(files.run(files.worker().call("test-long", 20 * SIX))) == 20 * SIX


def test_calls_of_one_user_run_at_the_same_time(files: LivingFiles) -> None:
    worker = files.worker()

    async def steps() -> float:
        begun = time.monotonic()
        await asyncio.gather(worker.call("test-wait", 0.5), worker.call("test-wait", 0.5), worker.info(["/"]))
        return time.monotonic() - begun

    assert files.run(steps()) < 0.95


def test_more_calls_than_processes_wait_for_their_turn(files: LivingFiles) -> None:
    worker = files.worker()

    async def steps() -> int:
        await asyncio.gather(*(worker.info(["/"]) for _ in range(50)))
        return len(worker._idle)

    assert files.run(steps()) <= file_worker.MOST_PROCESSES


def test_a_worker_that_died_is_replaced(files: LivingFiles) -> None:
    worker = files.worker()
    files.run(worker.info(["/"]))
    (process,) = worker._idle
    os.kill(process.pid, signal.SIGKILL)

    async def gone() -> None:
        while not process.ended:
            await asyncio.sleep(0.01)

    files.run(gone())
    assert files.run(worker.info(["/"]))


def test_a_call_whose_worker_dies_fails(files: LivingFiles) -> None:
    worker = files.worker()

    async def steps() -> None:
        asked = asyncio.ensure_future(worker.call("test-wait", 60))
        while not worker._busy:
            await asyncio.sleep(0.01)
        os.kill(next(iter(worker._busy)).pid, signal.SIGKILL)
        await asked

    with pytest.raises(SetupError, match="ended before it answered"):
        files.run(steps())


def test_a_call_that_takes_too_long_is_ended(files: LivingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_worker, "CALL_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match="took longer"):
        files.run(files.worker().call("test-wait", 60))


def test_a_cancelled_call_keeps_its_process_until_it_is_done(files: LivingFiles) -> None:
    worker = files.worker()

    async def steps() -> tuple[int, int]:
        asked = asyncio.ensure_future(worker.call("test-wait", 0.3))
        while not worker._busy:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        before = len(worker._busy)
        while worker._busy:
            await asyncio.sleep(0.01)
        return before, len(worker._idle)

    assert files.run(steps()) == (1, 1)


def test_a_defect_in_a_call_is_an_error_and_not_the_end_of_the_worker(files: LivingFiles) -> None:
    worker = files.worker()
    with pytest.raises(SetupError, match="KeyError"):
        files.run(worker.call("test-fail"))
    with pytest.raises(SetupError, match="knows no call"):
        files.run(worker.call("nothing-of-that-name"))
    assert len(worker._idle) == 1


def test_only_the_identities_used_last_keep_their_processes(files: LivingFiles) -> None:
    files.several_ids()
    for uid in range(1, file_worker.MOST_IDENTITIES + 3):
        files.run(files.worker(uid, uid).info(["/"]))
    assert len(files.workers._workers) == file_worker.MOST_IDENTITIES


@pytest.mark.usefixtures("swept")
def test_no_worker_outlives_its_supervisor() -> None:
    program = """if True:
        import asyncio, os, signal, sys
        from stockade import AsyncSandbox, Policy
        from stockade.sandbox.file_worker import FileWorkers

        async def main():
            box = AsyncSandbox(Policy(backend="native"))
            await box.open()
            workers = FileWorkers(box)
            worker = await workers.of()
            await worker.info(["/"])
            print(worker._idle[0].pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 5
    while Path(f"/proc/{int(done.stdout)}").exists():
        state = Path(f"/proc/{int(done.stdout)}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_sandbox_without_ids_of_its_own_has_a_worker_too() -> None:
    async def steps() -> list[object]:
        async with AsyncSandbox() as box:
            workers = FileWorkers(box)
            try:
                worker = await workers.of()
                found: list[object] = [facts.kind for facts in await worker.info(["/tmp"])]
                try:
                    await worker.open("/etc/nothing")
                except NotFoundError as error:
                    found.append(type(error))
                try:
                    await (await workers.of(1000, 1000)).info(["/"])
                except StockadeError as error:
                    found.append(type(error))
                return found
            finally:
                await workers.close()

    assert asyncio.run(steps()) == ["directory", NotFoundError, PolicyError]
