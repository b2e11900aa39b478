"""Every run has a receipt, which says of that very run what was enforced and how it ended."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import AsyncSandbox, Policy, PolicyError, Receipt, ReceiptError, Sandbox
from stockade.gate import client
from stockade.receipt import chain, keys
from stockade.receipt.verify import check_log
from stockade.runs.io.eventloop import Events
from stockade.runs.register import register
from stockade.sandbox.sandbox import NO_EXTRAS, run_once_steps
from support.made_receipts import log, public
from support.means import applies

EMPTY = hashlib.sha256(b"").hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def receipts(home: Path) -> list[Receipt]:
    """All of them, each verified, and as a chain."""
    known = {key.id: key.public for key in keys.known(str(home))}
    check_log(log(home), known)
    return [entry.receipt for entry in log(home).all()]


def endings(home: Path) -> list[tuple[str, int]]:
    found = [receipt.predicate.ending for receipt in receipts(home)]
    return [(one.outcome, one.exit_code) for one in found]


def test_the_receipt_says_what_the_result_says(stockade_home: Path, workspace: Path) -> None:
    policy = Policy(workspace=str(workspace), limits={"wall": "20s"})
    script = "echo out; echo err >&2; echo 1 > new; exit 3"
    result = stockade.run(["sh", "-c", script], policy, who={"agent": "coder", "words": "try"})
    assert result.receipt is not None
    said = stockade.verify(result.receipt, public(stockade_home), result=result).predicate
    assert (said.ending.outcome, said.ending.exit_code, said.ending.signal) == ("exited", 3, None)
    assert (said.who.agent, said.who.category, said.who.words) == ("coder", "", "try")
    assert said.command.program == "sh"
    assert said.command.words == sha256(f"sh\0-c\0{script}\0".encode())
    assert said.policy == policy.hash and said.plan == result.plan
    assert {
        name: (one.requested, one.mechanism, one.observed, one.grade) for name, one in said.controls.items()
    } == {
        name: (one.requested, one.mechanism, one.observed, one.grade) for name, one in result.controls.items()
    }
    assert said.evidence is not None
    assert said.evidence["filter"] == said.filter and said.evidence["seccomp"] == 2
    assert said.network.mode == "none"
    assert said.host.kernel == os.uname().release and said.host.landlock == stockade.Host.current().landlock
    assert said.host.stockade == stockade.__version__ and said.host.uid == os.geteuid()
    assert result.receipt.subjects == {
        "stdout": sha256(b"out\n"),
        "stderr": sha256(b"err\n"),
        "changes": sha256(b"added\0new\0"),
        "result": result.receipt.subjects["result"],
    }
    assert said.duration == int(result.usage.wall * 1_000_000)


def test_what_patterns_of_deny_hid_is_counted(workspace: Path, stockade_home: Path) -> None:
    for name in ("a.pem", "sub/b.pem"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).touch()
    policy = Policy(workspace=str(workspace), deny=["**/*.pem", "*.key?", ".env"])
    result = stockade.run(["true"], policy)
    assert result.receipt is not None and result.matched == {"**/*.pem": 2, "*.key?": 0}
    assert result.receipt.predicate.matched == result.matched
    stockade.verify(result.receipt, public(stockade_home), result=result)
    without = stockade.run(["true"]).receipt
    assert without is not None and b"matched" not in without.payload, "as receipts were before"
    many = [f"*{'x' * 200}{number}?" for number in range(500)]
    receipt = stockade.run(["true"], Policy(workspace=str(workspace), deny=many)).receipt
    assert receipt is not None and 100 < len(receipt.predicate.matched) < 500


def test_no_output_no_argument_and_no_variable_is_in_it(stockade_home: Path) -> None:
    secret = "ey-secret-3141592653589"
    policy = Policy(env={"TOKEN": secret})
    result = stockade.run(["sh", "-c", f"echo {secret} $TOKEN; echo {secret} >&2"], policy)
    assert secret.encode() in result.stdout and result.receipt is not None
    assert secret.encode() not in result.receipt.payload
    assert all(secret.encode() not in file.read_bytes() for file in stockade_home.glob("receipts*"))


def test_streams_are_digested_whole_also_what_is_not_kept(workspace: Path) -> None:
    """Results over 64 KiB, and more than is kept in memory."""
    result = stockade.run(["head", "-c", "300000", "/dev/zero"], Policy(limits={"output": 1000}))
    assert result.receipt is not None and len(result.stdout) == 1000
    assert result.receipt.subjects["stdout"] == sha256(bytes(300_000))
    assert result.receipt.predicate.ending.truncated


def test_every_way_to_end_has_its_receipt(stockade_home: Path) -> None:
    """Timed out, killed by a signal, crashed, not found: never "completed", never a default policy."""
    policy = Policy(limits={"wall": "5s"})
    stockade.run(["sleep", "50"], policy, timeout=0.2, grace=0)
    stockade.run(["sh", "-c", "kill -9 $$"], policy)
    stockade.run(["sh", "-c", "kill -SEGV $$"], policy)
    stockade.run(["no-such-command"], policy)
    stockade.run(["sh", "-c", "kill -SYS $$"], policy)
    assert endings(stockade_home) == [
        ("timed-out", 124),
        ("signalled", 137),
        ("signalled", 139),
        ("setup-failed", 127),
        ("denied", 126),
    ]
    for receipt in receipts(stockade_home):
        assert receipt.predicate.policy == policy.hash
        assert receipt.predicate.controls["limits.wall"].requested == 'limits.wall = "5s"'


def test_memory_that_runs_out_is_in_the_receipt(stockade_home: Path) -> None:
    applies(stockade.Host.current().has("cgroup.memory"), "there is no memory cgroup")
    policy = Policy(limits={"memory": "32M"})
    stockade.run(["python3", "-c", "x = bytearray(10**9)"], policy)
    (receipt,) = receipts(stockade_home)
    assert receipt.predicate.ending.outcome == "out-of-memory"
    assert receipt.predicate.evidence is not None
    assert str(32 << 20) in receipt.predicate.evidence["cgroups"].values()


def test_a_refused_run_has_one_that_claims_nothing(stockade_home: Path) -> None:
    policy = Policy(read=["/no/such/place"])
    with pytest.raises(PolicyError) as caught:
        stockade.run(["true"], policy, who={"agent": "a"})
    (receipt,) = receipts(stockade_home)
    assert caught.value.receipt == receipt
    said = receipt.predicate
    assert (said.ending.outcome, said.ending.error) == ("setup-failed", "PolicyError")
    assert said.policy == policy.hash and said.who.agent == "a" and said.command.program == "true"
    assert said.controls == {} and said.evidence is None and receipt.subjects == {}
    with pytest.raises(ReceiptError, match="nothing was started"):
        stockade.verify(receipt, public(stockade_home), require=["files"])


def test_a_gate_that_fails_leaves_one_with_the_stage(
    stockade_home: Path, sabotaged_gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sabotaged_gate))
    monkeypatch.setattr(client, "EXTRA_ARGUMENTS", ("filter",))
    with pytest.raises(stockade.SetupError):
        stockade.run(["true"])
    client.shutdown()
    (receipt,) = receipts(stockade_home)
    assert (receipt.predicate.ending.error, receipt.predicate.ending.stage) == ("SetupError", "evidence")
    assert receipt.predicate.controls == {}


def test_what_an_exception_of_the_caller_ends_is_cancelled(stockade_home: Path) -> None:
    class Upset(Exception):
        pass

    def sink(_: bytes) -> None:
        raise Upset

    with pytest.raises(Upset):
        stockade.run(["echo", "x"], on_stdout=sink)
    (receipt,) = receipts(stockade_home)
    assert (receipt.predicate.ending.outcome, receipt.predicate.ending.error) == ("cancelled", "Upset")
    assert receipt.predicate.controls["files"].grade == "read from the kernel by the parent"


def test_an_interruption_after_the_end_of_the_program_makes_no_second_one(stockade_home: Path) -> None:
    """The receipt is made while the gate takes the sandbox apart, and Ctrl-C may come then."""
    stockade.run(["true"])
    newest = stockade_home / "receipts.db-tail"
    made = newest.stat().st_size
    with Events() as events:
        steps = run_once_steps(["true"], None, {}, NO_EXTRAS, events)
        patience = next(steps)
        while newest.stat().st_size == made:
            events.wait(patience)
            patience = next(steps)
        patience = steps.throw(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            while True:
                events.wait(patience)
                patience = next(steps)
    assert endings(stockade_home) == [("exited", 0)] * 2


def test_a_living_sandbox_has_those_of_its_runs(stockade_home: Path) -> None:
    stockade.run(["true"])
    with Sandbox(who={"agent": "a", "action": "all"}) as box:
        box.run(["true"])
        box.run(["false"], who={"action": "one"})
        with box.start(["sleep", "50"]):
            pass  # nobody waits for it
        box.start(["true"]).wait()
    made = box.receipts
    assert [one.predicate.ending.outcome for one in made] == ["exited", "exited", "cancelled", "exited"]
    assert [one.predicate.sequence for one in made] == [2, 3, 4, 5]
    assert [one.predicate.who.action for one in made] == ["all", "one", "all", "all"]
    assert {one.predicate.who.agent for one in made} == {"a"}
    assert len({one.predicate.sandbox for one in made}) == 1
    assert "stdout" in made[0].subjects and "stdout" not in made[3].subjects
    assert len(receipts(stockade_home)) == 5


def test_the_same_over_asyncio(stockade_home: Path) -> None:
    async def main() -> list[str]:
        async with AsyncSandbox(who={"agent": "a"}) as box:
            await asyncio.gather(*(box.run(["true"]) for _ in range(4)))
            slow = asyncio.create_task(box.run(["sleep", "50"]))
            await asyncio.sleep(0.3)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            process = await box.start(["sleep", "50"])
            await process.close()
        return [one.predicate.ending.outcome for one in box.receipts]

    assert asyncio.run(main()) == ["exited"] * 4 + ["cancelled"] * 2
    assert len(receipts(stockade_home)) == 6


def test_runs_of_several_threads_and_processes_make_one_chain(stockade_home: Path) -> None:
    code = "import stockade; [stockade.run(['true']) for _ in range(3)]"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    with Sandbox() as box:
        box.run(["true"])
    assert [process.wait() for process in others] == [0, 0]
    assert len(receipts(stockade_home)) == 7


@pytest.mark.usefixtures("swept")
def test_what_a_killed_supervisor_could_not_sign_the_next_start_does(stockade_home: Path) -> None:
    policy = Policy(limits={"wall": "50s"})
    code = (
        "import stockade, sys\n"
        "policy = stockade.Policy(limits={'wall': '50s'})\n"
        "stockade.run(['sh', '-c', 'echo begun; sleep 40'], policy, on_stdout=sys.stdout.buffer.write)\n"
    )
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    for _ in range(2):  # and once only
        register.sweep(str(stockade_home))
        (receipt,) = receipts(stockade_home)
    said = receipt.predicate
    assert (said.ending.outcome, said.ending.error) == ("cancelled", "SupervisorDied")
    assert said.policy == policy.hash and said.command.program == "sh" and said.controls == {}


@pytest.mark.usefixtures("swept")
def test_a_killed_supervisor_leaves_a_whole_chain(stockade_home: Path) -> None:
    code = "import stockade\nwhile True: stockade.run(['true']); print('.', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(receipts(stockade_home)) >= 2
    stockade.run(["true"])
    receipts(stockade_home)


def test_a_run_whose_receipt_cannot_be_made_is_an_error_with_the_result(stockade_home: Path) -> None:
    stockade.run(["true"])
    chain.shutdown()
    keys._signers.clear()
    (stockade_home / "keys" / keys.SIGNING).chmod(0o644)
    with pytest.raises(ReceiptError, match="not a private file"):
        stockade.run(["true"])  # seen while it runs, which ends it
    (stockade_home / "keys" / keys.SIGNING).chmod(0o600)
    with Sandbox() as box:
        box.run(["true"])
        (stockade_home / "keys" / keys.SIGNING).write_text("spoilt")
        with pytest.raises(ReceiptError, match="has run") as caught:
            box.run(["echo", "done"])
    assert caught.value.result is not None and caught.value.result.stdout == b"done\n"
    assert caught.value.failure == "not-made"


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ({"name": "x"}, "there is no field 'name'"),
        ({"agent": "x" * 1001}, "at most 1000"),
        ({"agent": 3}, "must be text"),
    ],
)
def test_words_that_are_none_are_refused(who: dict[str, str], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        stockade.run(["true"], who=who)


def test_names_that_are_not_utf_8_are_no_obstacle(stockade_home: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    (tmp_path / odd).mkdir()
    result = stockade.run(["sh", "-c", "true", odd], Policy(read=[str(tmp_path / odd)]), who={"agent": odd})
    assert result.receipt is not None
    stockade.verify(result.receipt, public(stockade_home), result=result)
    stockade.run([odd])
    assert len(receipts(stockade_home)) == 2


def test_the_key_cannot_be_seen_inside(stockade_home: Path) -> None:
    stockade.run(["true"])
    private = stockade_home / "keys" / keys.SIGNING
    for path in (stockade_home, private, stockade_home.parent):
        with pytest.raises(PolicyError):
            stockade.run(["cat", str(private)], Policy(read=[str(path)]))
    result = stockade.run(["cat", str(private)])
    assert result.exit_code != 0 and b"PRIVATE" not in result.stdout


def test_nothing_to_sign_with_is_loaded_before_the_program_runs() -> None:
    code = (
        "import stockade, sys\n"
        "from stockade.runs import supervise\n"
        "start = supervise.Watch.start\n"
        "def watched(*words, **options):\n"
        "    print(*{'ctypes', 'sqlite3', 'cryptography'} & set(sys.modules))\n"
        "    return start(*words, **options)\n"
        "supervise.Watch.start = watched\n"
        "stockade.run(['true'])\n"
        "print('cryptography' in sys.modules)\n"
    )
    # The filter is compiled, and the state directory knows the host; this process knows it from other tests.
    subprocess.run([sys.executable, "-c", "import stockade; stockade.run(['true'])"], check=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nFalse\n"
