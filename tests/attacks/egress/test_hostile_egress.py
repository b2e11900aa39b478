"""An egress process that lies, floods and hangs: its supervisor goes on, and says what happened.

The hostile process is a real one, behind its walls, that runs other code than ours from its first message on.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, SetupError
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.network import egress_process, resolver_process
from stockade.sandbox.sandbox import RunExtras, run_once
from support.egress import CONFINED

POLICY = Policy(net=["api.good.example"])
#: It has got its descriptors: records, nudge, resolver, listeners.
HANDED = (
    CONFINED
    + """
import json, os, socket, time
supervisor = socket.socket(fileno=3)
text, handed, _, _ = socket.recv_fds(supervisor, 1 << 20, 253)
records, nudge, resolver, *listeners = handed
"""
)
READY = HANDED + """supervisor.send(b'{"ready": true}')\n"""
#: It ends with its supervisor.
STAY = "supervisor.recv(9)\n"


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the egress processes that follow run this code."""

    def replace(code: str) -> None:
        monkeypatch.setattr(egress_process, "CODE", code)

    return replace


@pytest.fixture(autouse=True)
def as_many_descriptors_as_before() -> Iterator[None]:
    """The supervisor keeps none that a hostile process has sent."""
    stockade.run(["true"], POLICY)
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


ANSWERS = {
    "no JSON": "supervisor.send(b'nonsense')",
    "another kind": "supervisor.send(b'[1, 2]')",
    "bytes": "supervisor.send(bytes(range(256)))",
    "not quite ready": """supervisor.send(b'{"ready": 1}')""",
    "an error with escapes": """supervisor.send(b'{"error": "\\x1b[2J\\\\u001b]52;c;eA==\\\\u0007"}')""",
    "a long one": "supervisor.send(b'[' * 60000)",
    "longer than it may be": """supervisor.send(b'{"ready": true, "x": "' + b'y' * 100000 + b'"}')""",
    "deep": """supervisor.send(b'{"a":' * 9000 + b'1' + b'}' * 9000)""",
    "an empty one": "supervisor.send(b'')",
    "an end": "supervisor.close()",
    "death": "os._exit(0)",
    "a number without end": """supervisor.send(b'{"ready": ' + b'9' * 50000 + b'}')""",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_forged_answer_is_an_error_and_nothing_starts(hostile: Callable[[str], None], answer: str) -> None:
    hostile(HANDED + ANSWERS[answer] + "\n" + STAY)
    began = time.monotonic()
    with pytest.raises(SetupError) as caught:
        stockade.run(["touch", "/tmp/started"], POLICY)
    assert caught.value.stage in ("egress", "") and time.monotonic() - began < 8
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_an_answer_with_descriptors_leaves_none(hostile: Callable[[str], None]) -> None:
    code = """socket.send_fds(supervisor, [b'{"ready": true}'], [records] * 200)\n"""
    hostile(HANDED + code + STAY)
    for _ in range(2):
        assert stockade.run(["true"], POLICY).ok


def test_no_answer_ends_the_launch(hostile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_process, "ANSWER_SECONDS", 0.5)
    hostile(HANDED + STAY)
    with pytest.raises(SetupError, match="did not answer"):
        stockade.run(["true"], POLICY)


#: Every record is a lie: as many and as large as the memory holds.
FORGED = """
import random, struct
from stockade.egress import records as format
chance = random.Random(65)
def forge():
    block = bytearray(format.SIZE)
    struct.pack_into("<8s9Q", block, 0, b"egress-1", *(2**64 - 1,) * 9)
    for slot in range(format.SLOTS):
        name = bytes(chance.randrange(256) if slot % 3 else 0x61 for _ in range(253))
        when = chance.choice([float("nan"), float("inf"), -1e308, 1e308, 2.0**39, 1e9])
        format._SLOT.pack_into(block, format._HEADER_SIZE + slot * format._SLOT_SIZE,
            chance.choice([1, 2**64 - 1, slot]), when, chance.choice([when, 0.5]),
            2**64 - 1 if slot % 7 else 2**62, 2**63 - 1, 2**32 - 1,
            chance.choice([-2**31, 2**31 - 1, 0]), 65535, slot % 3, slot % 4,
            slot % 256, slot % 2, chance.choice([0, 4, 6, 255]), 253, bytes(16), name,
            chance.choice([0, 4, 6, 255]), slot, bytes([198, 18, 0, 2]), chance.randbytes(16))
    os.pwrite(records, block, 0)
"""


def test_forged_records_make_a_result_all_the_same(hostile: Callable[[str], None]) -> None:
    hostile(READY + FORGED + "forge()\n" + STAY)
    told: list[object] = []
    result = stockade.run(["sleep", "0.3"], POLICY)
    assert result.ok and result.receipt is not None
    shown = repr((result.network, result.denials, result.usage, result.warnings, told))
    assert all(" " <= letter <= "~" for letter in shown)
    assert all(0 <= one.time < 2**40 and one.count >= 1 for one in result.network)
    assert len(result.network) <= 4096 and len(result.denials) <= 100
    stockade.verify(result.receipt, stockade.receipt.public_key(), result=result)


def test_records_that_change_all_the_time_do_not_keep_the_supervisor(hostile: Callable[[str], None]) -> None:
    storm = """
block = os.pread(records, format.SIZE, 0)
while True:
    os.pwrite(records, block, 0)
    os.eventfd_write(nudge, 1)
"""
    hostile(READY + FORGED + "forge()\n" + storm)
    began = time.monotonic()
    with stockade.Sandbox(POLICY) as box:
        for _ in range(3):
            assert box.run(["true"]).ok
    assert time.monotonic() - began < 12


#: It lets the supervisor wait for the next byte, if it can.
BLOCKING = """
import fcntl
try:
    fcntl.fcntl(nudge, fcntl.F_SETFL, fcntl.fcntl(nudge, fcntl.F_GETFL) & ~os.O_NONBLOCK)
except OSError:
    pass
try:
    os.set_blocking(nudge, True)
except OSError:
    pass
while True:
    os.eventfd_write(nudge, 1)
    os.eventfd_read(nudge)
"""


def test_a_nudge_that_is_taken_back_does_not_keep_the_supervisor(
    hostile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_process, "DRAIN_SECONDS", 0.2)
    hostile(READY + BLOCKING)
    began = time.monotonic()
    extras = RunExtras(on_decision=lambda one: None)
    result = run_once(["sleep", "1"], POLICY, {}, extras)
    assert result.ok and time.monotonic() - began < 8


def test_a_hung_egress_process_does_not_keep_the_end_of_a_run(hostile: Callable[[str], None]) -> None:
    hostile(READY + STAY)
    began = time.monotonic()
    with stockade.Sandbox(POLICY) as box:
        assert box._box is not None and box._box.egress is not None
        os.kill(_egress_pid(box._box.egress.process.pidfd), signal.SIGSTOP)
        assert box.run(["true"]).ok
    assert time.monotonic() - began < 6


def _egress_pid(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    (first,) = [line.split()[1] for line in lines if line.startswith("Pid:")]
    return int(Path(f"/proc/{first}/task/{first}/children").read_text().split()[0])


def test_it_holds_the_connections_of_one_sandbox_only(hostile: Callable[[str], None]) -> None:
    """Of two sandboxes, a taken-over egress has the sockets of its own, and no descriptor of the other."""
    code = """
kinds = []
for number in range(256):
    try:
        kinds.append(os.fstat(number).st_mode & 0o170000)
    except OSError:
        pass
sockets = len(handed) - 2 + 1
alone = kinds.count(0o140000) == sockets and len(kinds) == len(handed) + 5
supervisor.send(json.dumps({"ready": alone}).encode())
"""
    hostile(HANDED + code + STAY)
    with stockade.Sandbox(POLICY) as one, stockade.Sandbox(POLICY) as other:
        assert one.run(["true"]).ok and other.run(["true"]).ok


#: It asks without end, for names and for what is none, with descriptors, and reads no answer.
ASKING = """
end = socket.socket(fileno=resolver)
number = 0
while True:
    number += 1
    name = (b"localhost", b"x" * 300, b"\\x1b[2J", b"", b"n%d.invalid" % number)[number % 5]
    try:
        socket.send_fds(end, [number.to_bytes(4, "big") + name], [0, 1, 2] if number % 2 else [])
    except OSError:
        time.sleep(0.01)
"""


def test_one_that_floods_the_resolver_is_dropped_and_others_get_answers(
    hostile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_process, "DRAIN_SECONDS", 0.2)
    hostile(READY + ASKING)
    with stockade.Sandbox(POLICY) as box:
        (resolver,) = resolver_process.resolver_pids()
        for number in range(20):
            with Events() as events:
                home = os.environ["STOCKADE_HOME"]
                descriptor, _ = drive(resolver_process.connect_resolver(events, home), events)
            with socket.socket(fileno=descriptor) as end:
                end.settimeout(5)
                end.send(number.to_bytes(4, "big") + b"localhost")
                assert b"127.0.0.1" in end.recv(65536)
        assert box.run(["true"]).ok
        assert resolver_process.resolver_pids() == {resolver}
        if os.geteuid() == 0:  # others may not look
            assert len(os.listdir(f"/proc/{resolver}/fd")) < 40
