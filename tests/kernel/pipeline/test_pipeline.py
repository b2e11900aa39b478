"""Stages in sandboxes of their own, connected by pipes of the kernel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import Outcome, Pipeline, PolicyError, SetupError, Stage
from stockade.pipeline import stage_runs
from stockade.pipeline.stage import StageSettings
from stockade.receipt import public_key
from stockade.receipt.verify import verify

SECONDS = 20
CAT = Stage({}, ["cat"])


def sh(script: str, **options: object) -> Stage:
    return Stage({}, ["sh", "-c", script], **options)  # type: ignore[arg-type]


def open_links() -> list[str]:
    """The ends of pipes between stages that this process has open."""
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return [name for name in opened if "/cache/pipe" in name]


def test_each_stage_reads_what_the_one_before_prints() -> None:
    result = (CAT | Stage({}, ["tr", "a-z", "A-Z"]) | Stage({}, ["rev"])).run(input="abc\n", timeout=SECONDS)
    assert result.ok and result.text == "CBA\n"
    assert list(result.stages) == ["stage-0", "stage-1", "stage-2"]
    assert [stage.stdout for stage in result.stages.values()] == [b"", b"", b"CBA\n"]


def test_every_stage_has_its_own_policy(workspace: Path) -> None:
    (workspace / "seen").write_text("private")
    seeing = Stage({"read": [str(workspace)]}, ["cat", str(workspace / "seen")])
    blind = sh(f"cat; cat {workspace}/seen")
    result = (seeing | blind).run(timeout=SECONDS)
    assert result.text == "private" and "No such file" in result.stderr_text


def test_the_result_has_the_stderr_of_each_stage() -> None:
    result = (sh("echo first >&2; echo out") | sh("cat; echo second >&2")).run(timeout=SECONDS)
    assert [stage.stderr for stage in result.stages.values()] == [b"first\n", b"second\n"]
    assert result.stderr == b"second\n"


@pytest.mark.parametrize("stream", ["1", "2"])
def test_more_output_than_a_pipe_holds_does_not_stop_anything(stream: str) -> None:
    flood = f"head -c 1000000 /dev/zero >&{stream}; echo end"
    result = (sh(f"head -c 300000 /dev/zero >&2; {flood}") | sh(f"cat >/dev/null; {flood}")).run(
        timeout=SECONDS
    )
    assert result.ok
    assert len(result.stdout) + len(result.stderr) == 1_000_004
    assert len(result.stages["stage-0"].stderr) == 300_000 + (1_000_000 if stream == "2" else 0)


def test_the_supervisor_holds_no_end_of_a_pipe_while_the_stages_run() -> None:
    seen: list[list[str]] = []
    (sh("echo x; sleep 0.2") | CAT | CAT).run(on_stdout=lambda _: seen.append(open_links()), timeout=SECONDS)
    assert seen[0] == []


def test_a_forked_child_of_the_caller_keeps_no_stage_waiting() -> None:
    """Also not one that is forked while the pipes are open here."""
    script = (
        "import os, threading, time, stockade\n"
        "from stockade import Stage\n"
        "from stockade.pipeline import wiring\n"
        "real, children = wiring.StartBarrier.wait, []\n"
        "def wait(self, events):\n"
        "    children.append(os.fork())\n"
        "    if not children[-1]: time.sleep(60)\n"
        "    yield from real(self, events)\n"
        "wiring.StartBarrier.wait = wait\n"
        "print((Stage({}, ['echo', 'x']) | Stage({}, ['cat'])).run(timeout=10).outcome)\n"
        "for child in children: os.kill(child, 9), os.waitpid(child, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "exited\n", done.stderr


def test_the_first_stage_reads_a_file_or_a_pipe_of_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 200_000)
    count = CAT | Stage({}, ["wc", "-c"])
    with file.open("rb") as opened:
        assert count.run(stdin=opened, timeout=SECONDS).text == "200000\n"
    reader, writer = os.pipe()
    os.write(writer, b"12345")
    os.close(writer)
    assert count.run(stdin=reader, timeout=SECONDS).text == "5\n"
    os.close(reader)
    assert (Stage({}, ["cat"], input="own") | CAT).run(timeout=SECONDS).text == "own"


def test_streams_can_be_the_callers_own() -> None:
    script = (
        "from stockade import Stage\n"
        "stage = Stage({}, ['sh', '-c', 'echo e >&2; cat'])\n"
        "(stage | stage).run(stdin='inherit', stdout='inherit', stderr='inherit')\n"
        "stage.run(stdin='inherit', stdout='inherit', stderr='inherit')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=b"data\n", capture_output=True, check=True)
    assert done.stdout == b"data\n" and done.stderr == b"e\ne\ne\n"


def test_the_output_of_the_last_stage_comes_as_it_is_printed() -> None:
    pieces: list[tuple[float, bytes]] = []
    began = time.monotonic()
    slow = sh("echo one; sleep 0.6; echo two")
    (slow | CAT).run(on_stdout=lambda data: pieces.append((time.monotonic() - began, data)), timeout=SECONDS)
    assert b"".join(data for _, data in pieces) == b"one\ntwo\n"
    assert pieces[-1][0] - pieces[0][0] > 0.4


def test_a_stage_whose_reader_has_ended_gets_sigpipe() -> None:
    result = (Stage({}, ["yes"]) | Stage({}, ["head", "-n", "1"])).run(timeout=SECONDS)
    assert result.ok and result.stages["stage-0"].exit_code == 141


def test_pipefail_lets_the_last_failed_stage_decide() -> None:
    stages = [sh("exit 3"), sh("cat; exit 4"), CAT]
    assert Pipeline(stages).run(timeout=SECONDS).exit_code == 0
    result = Pipeline(stages, pipefail=True).run(timeout=SECONDS)
    assert (result.exit_code, result.ok) == (4, False) and "stage-1" in result.reason
    with pytest.raises(stockade.CommandError, match="stage-1"):
        result.check()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_stage_waits_for_an_end_that_never_comes(place: int) -> None:
    """Whichever ends first, or cannot be executed at all, the others end too."""
    stages = [Stage({}, ["yes"]), CAT, sh("cat >/dev/null; echo done")]
    stages[place] = Stage({}, ["no-such-program"])
    result = Pipeline(stages).run(timeout=SECONDS)
    assert result.outcome is not Outcome.TIMED_OUT
    assert list(result.stages.values())[place].exit_code == 127


def test_a_timeout_ends_all_stages_and_keeps_what_was_printed() -> None:
    stages = sh("echo early; sleep 60") | sh("echo noted >&2; cat; sleep 60")
    began = time.monotonic()
    result = stages.run(timeout=1)
    assert time.monotonic() - began < 15
    assert result.outcome is Outcome.TIMED_OUT and result.exit_code == 124
    assert result.stdout == b"early\n" and result.stderr == b"noted\n"


def test_the_time_of_the_whole_is_over_though_the_last_stage_ended_by_itself() -> None:
    result = (sh("sleep 60") | CAT).run(timeout=0.5)
    assert result.outcome is Outcome.TIMED_OUT and result.stages["stage-0"].outcome is Outcome.TIMED_OUT


def test_no_program_starts_unless_the_walls_of_all_stages_are_up(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    mark = tmp_path / "w" / "mark"
    eager = Stage({"write": [str(mark.parent)]}, ["touch", str(mark)])
    refused = Stage({"read": [str(tmp_path / "missing")]}, ["cat"])
    for stages in ([eager, refused], [refused, eager], [eager, eager, refused]):
        with pytest.raises(stockade.StockadeError, match="missing"):
            Pipeline(stages).run(timeout=SECONDS)
    assert not mark.exists()
    assert not open_links()


def test_stages_that_another_one_kept_from_starting_have_receipts_that_say_so() -> None:
    refused = Stage({"read": ["/no/such/path"]}, ["cat"])
    with pytest.raises(stockade.StockadeError):
        Pipeline([CAT, refused], name="broken").run()
    from stockade.receipt import chain
    from stockade.state import state_dir

    receipts = chain.of(state_dir(os.environ, os.environ["HOME"])).all()
    endings = {one.receipt.predicate.name: one.receipt.predicate.ending for one in receipts}
    assert endings["broken-stage-0"].outcome == endings["broken-stage-1"].outcome == "setup-failed"
    assert endings["broken-stage-0"].stage == "pipeline"


def test_an_error_in_a_callback_ends_all_stages_and_is_raised() -> None:
    def fail(_: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        (Stage({}, ["yes"]) | CAT).run(on_stdout=fail, timeout=SECONDS)


def test_each_receipt_names_the_pipeline_its_place_and_what_was_not_digested() -> None:
    result = Pipeline([sh("echo x"), CAT, CAT], name="letters").run(timeout=SECONDS)
    said = {}
    for place, stage in result.stages.items():
        assert stage.receipt is not None and verify(stage.receipt, public_key())
        one = stage.receipt.predicate
        assert one.pipeline is not None and one.name == f"letters-{place}"
        assert (one.pipeline.name, one.pipeline.place, one.pipeline.stages) == ("letters", place, 3)
        said[place] = (one.pipeline.not_digested, set(stage.receipt.subjects) & {"stdout", "stderr"})
    assert said == {
        "stage-0": ({"stdout": "stage-1"}, {"stderr"}),
        "stage-1": ({"stdin": "stage-0", "stdout": "stage-2"}, {"stderr"}),
        "stage-2": ({"stdin": "stage-1"}, {"stdout", "stderr"}),
    }
    assert len({one.receipt.predicate.pipeline.id for one in result.stages.values()}) == 1  # type: ignore[union-attr]


def test_stages_are_in_ps_and_logs_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    from stockade import cli

    seen: list[str] = []

    def look(_: bytes) -> None:
        if not seen:
            capsys.readouterr()
            cli.main(["ps"])
            seen.append(capsys.readouterr().out)

    Pipeline([sh("echo x; sleep 0.3"), CAT], name="seen").run(on_stdout=look, timeout=SECONDS)
    assert "seen-stage-0" in seen[0] and "seen-stage-1" in seen[0]
    cli.main(["logs"])
    shown = capsys.readouterr().out
    assert "seen-stage-0" in shown and "seen-stage-1" in shown


def shout(mark: str) -> None:
    for line in sys.stdin:
        print(line.strip().upper() + mark)


def fail() -> None:
    raise ValueError("nothing fits")


def test_a_function_can_be_a_stage() -> None:
    result = (sh("echo a; echo b") | Stage({}, shout, args=("!",)) | Stage({}, ["sort", "-r"])).run(
        timeout=SECONDS
    )
    assert result.text == "B!\nA!\n"
    own = stockade.sandboxed(timeout=5)(shout)
    assert (sh("echo a") | Stage(None, own, args=("?",))).run(timeout=SECONDS).text == "A?\n"
    assert Stage({}, shout, args=("",), input="x").run(timeout=SECONDS).text == "X\n"


def test_a_function_that_raises_prints_its_traceback_and_fails() -> None:
    result = (sh("echo a") | Stage({}, fail)).run(timeout=SECONDS)
    assert result.exit_code == 1 and "ValueError: nothing fits" in result.stderr_text
    with pytest.raises(PolicyError, match="generator"):
        Stage({}, lambda: (yield))


def test_everything_works_with_await() -> None:
    async def main() -> list[str]:
        pipelines = [(Stage({}, ["echo", word]) | CAT).run_async(timeout=SECONDS) for word in "abc"]
        alone = Stage({}, ["cat"]).run_async(input="d", timeout=SECONDS)
        return [result.text for result in await asyncio.gather(*pipelines, alone)]

    assert asyncio.run(main()) == ["a\n", "b\n", "c\n", "d"]


def test_a_cancelled_task_ends_all_stages() -> None:
    async def main() -> float:
        task = asyncio.create_task((sh("sleep 60") | sh("sleep 60")).run_async())
        await asyncio.sleep(1)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(main()) < 10


@pytest.mark.parametrize(
    "script", ["cat /dev/stdin", "echo x > /dev/stdout", "python3 -c 'open(\"/dev/fd/0\")'"]
)
def test_a_stage_that_opens_its_pipe_by_a_name_is_told_what_to_do(script: str) -> None:
    result = Pipeline([CAT, sh(script), CAT]).run(timeout=SECONDS)
    assert "cannot open a pipe to another stage by its name" in result.stages["stage-1"].hint


def test_a_stage_alone_is_a_run() -> None:
    result = Stage({}, ["cat"]).run(input="x", name="alone", timeout=SECONDS)
    assert type(result) is stockade.Result and result.text == "x"
    assert result.receipt is not None and result.receipt.predicate.pipeline is None
    assert result.receipt.predicate.name == "alone"


def test_a_stage_alone_can_have_the_callers_terminal() -> None:
    import pty

    script = (
        "from stockade import Stage; print(Stage({}, ['sh', '-c', 'tty; stty size']).run(terminal=True).ok)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 1000)
        except OSError:
            break
        shown += piece
        if not piece:
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"/dev/pts/" in shown and b"True" in shown
    with pytest.raises(PolicyError, match="not a terminal"):
        CAT.run(terminal=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline([CAT]), "at least two stages"),
        (lambda: Pipeline([]), "at least two stages"),
        (lambda: Pipeline([CAT] * (stage_runs.MOST_STAGES + 1)), "at most"),
        (lambda: Pipeline([CAT, ["cat"]]), "not a Stage"),
        (lambda: Stage({}, "cat file"), "one string"),
        (lambda: Stage({}, ["cat"], stderr="terminal"), "stderr"),
        (lambda: Stage({}, ["cat"], args=(1,)), "function"),
        (lambda: Stage({}, ["cat"], input="a", stdin=0), "not both"),
        (lambda: CAT | Stage({}, ["cat"], input="x"), "input of its own"),
        (lambda: (CAT | CAT).run(name="x" * 60), "not a name"),
        (lambda: (CAT | CAT).run(stdin="data.txt"), "not an open file"),
    ],
)
def test_mistakes_are_refused_in_words(make: object, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make()  # type: ignore[operator]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="timeout"):
        (CAT | CAT).run(timeuot=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        CAT | ["cat"]  # type: ignore[operator]


def test_a_setup_that_fails_after_some_walls_are_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from stockade.pipeline import wiring

    def broken(self: wiring.StartBarrier, events: object) -> object:
        raise SetupError("broken", stage="test")
        yield

    monkeypatch.setattr(wiring.StartBarrier, "wait", broken)
    with pytest.raises(SetupError, match="broken"):
        (CAT | CAT | CAT).run(timeout=SECONDS)


def test_an_interrupt_that_one_stage_caught_ends_the_others_too() -> None:
    """The exception of a signal arrives wherever the program is, also in the steps of one stage."""

    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    result = (sh("echo x; exec sleep 60") | CAT).run_with(
        StageSettings(on_stdout=interrupt, cancelled_by=(KeyboardInterrupt,))
    )
    assert result.outcome is Outcome.CANCELLED
    assert [stage.outcome for stage in result.stages.values()] == [Outcome.CANCELLED] * 2
    assert time.monotonic() - began < 50
