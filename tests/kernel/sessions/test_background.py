"""Commands in the background, and their logs from a byte on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import stockade
from stockade import AsyncSandbox, Policy, PolicyError, Sandbox, SetupError


def test_logs_are_read_from_a_byte_on_while_it_runs_and_afterwards() -> None:
    with Sandbox() as box:
        box.run(["mkfifo", "/tmp/go"])
        with box.background(["sh", "-c", "printf one; printf err >&2; cat /tmp/go; exit 3"]) as job:
            seen = job.logs()
            while not seen.data:
                seen = job.logs()
            assert (seen.data, seen.cursor, seen.ended, job.status, job.result) == (
                b"one",
                3,
                False,
                "running",
                None,
            )
            assert job.logs(seen.cursor).data == b""
            with pytest.raises(stockade.TimeoutError, match="still runs"):
                job.wait(0.05)
            box.run(["sh", "-c", "printf two > /tmp/go"])
            result = job.wait(30)
            assert (result.exit_code, job.status, job.result, result.stdout) == (3, "exited", result, b"")
            assert job.logs(seen.cursor) == job.logs(3, most=9)
            last = job.logs(3)
            assert (last.data, last.cursor, last.ended) == (b"two", 6, True)
            assert job.logs(1, most=2).data == b"ne" and not job.logs(1, most=2).ended
            assert (job.logs(stream="stderr").data, job.logs(99).data) == (b"err", b"")


def test_many_run_beside_each_other_and_print_more_than_a_pipe_holds() -> None:
    with Sandbox(Policy(limits={"output": "1K"})) as box:
        jobs = [box.background(["seq", str(n * 20000)]) for n in range(1, 6)]
        for n, job in enumerate(jobs, 1):
            assert job.wait(60).ok and not job.wait().truncated
            whole, cursor = b"", 0
            while not (piece := job.logs(cursor, most=50_000)).ended:
                whole, cursor = whole + piece.data, piece.cursor
            assert whole + piece.data == b"".join(b"%d\n" % i for i in range(1, n * 20000 + 1))
            job.close()


def test_a_log_is_out_of_the_sandboxes_reach_and_leaves_no_file(stockade_home: Path) -> None:
    with Sandbox() as box, box.background(["sh", "-c", "ls -l /proc/self/fd; echo > /proc/self/fd/1"]) as job:
        assert job.wait(30).ok
        assert b"pipe:" in job.logs().data and str(stockade_home).encode() not in job.logs().data
        assert list(stockade_home.rglob("output/*")) == []


def test_it_is_killed_with_everything_it_started() -> None:
    with Sandbox() as box:
        job = box.background(["sh", "-c", "trap '' TERM; sleep 60 & echo up; wait; sleep 60"], grace=0.1)
        while not job.logs().data:
            pass
        job.kill()
        assert job.wait(30).outcome == "cancelled" == job.status
        job.kill()
        job.close()
        with pytest.raises(SetupError, match="closed"):
            job.logs()
        late = box.background(["sleep", "60"], timeout=0.1)
        assert late.wait(30).outcome == "timed-out"
        late.close()


def test_it_ends_with_its_sandbox() -> None:
    with Sandbox() as box:
        job = box.background(["sleep", "60"])
    assert job.wait(30).outcome == "cancelled"
    job.close()


def test_what_is_wrong_is_said() -> None:
    with Sandbox() as box, box.background(["no-such-command"], input=b"x") as job:
        assert (job.wait(30).exit_code, job.status) == (127, "setup-failed")
        for bad in ({"stream": "stdin"}, {"cursor": -1}, {"most": -1}):
            with pytest.raises(PolicyError):
                job.logs(**bad)
        with pytest.raises(PolicyError, match="one string"):
            box.background("true")
    with pytest.raises(SetupError, match="not open"):
        box.background(["true"])


def test_a_full_disk_loses_output_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from stockade.sessions import background

    monkeypatch.setattr(background, "MOST_SPILLED", 1000)
    with Sandbox() as box, box.background(["head", "-c", "200000", "/dev/zero"]) as job:
        assert job.wait(30).ok
        piece = job.logs()
        assert len(piece.data) + piece.lost == 200000 and piece.ended and piece.lost > 0


def test_the_same_with_await() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            jobs = [await box.background(["sh", "-c", f"cat; exit {n}"], input=b"in") for n in range(4)]
            assert [(await job.wait(30)).exit_code for job in jobs] == [0, 1, 2, 3]
            assert {job.logs().data for job in jobs} == {b"in"}
            async with await box.background(["sh", "-c", "echo up; sleep 60"], grace=0.1) as job:
                with pytest.raises(stockade.TimeoutError):
                    await job.wait(0.05)
                job.kill()
                assert (await job.wait(30)).outcome == "cancelled"
            never = await box.background(["sleep", "60"])
            await never.close()
            with pytest.raises(SetupError, match="before it began"):
                await never.wait()
            last = await box.background(["sleep", "60"])
            for job in jobs:
                await job.close()
        assert (await last.wait(30)).outcome == "cancelled"
        await last.close()

    asyncio.run(main())
