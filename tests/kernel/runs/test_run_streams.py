"""What goes in and comes out: byte-exact, concurrent, bounded."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest

import stockade
from stockade import Policy, PolicyError
from stockade.sandbox.sandbox import RunExtras, run_once

PYTHON = "/usr/bin/python3"
MEBIBYTE = 1 << 20
BIG = 5 * MEBIBYTE


def test_stdout_and_stderr_are_kept_apart() -> None:
    result = stockade.run(["sh", "-c", "echo out; echo err >&2"])
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


def test_output_is_byte_exact() -> None:
    every = bytes(range(256)) * 3
    result = stockade.run([PYTHON, "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 3)"])
    assert result.stdout == every


def test_text_replaces_what_is_not_utf8() -> None:
    assert stockade.run(["printf", r"caf\303\251 \377"]).text == "café \ufffd"


def test_both_streams_are_drained_at_once() -> None:
    script = (
        "import os\n"
        f"for i in range({BIG} // 65536):\n"
        "    os.write(2, b'e' * 65536)\n"
        "    os.write(1, b'o' * 65536)\n"
    )
    result = stockade.run([PYTHON, "-c", script], timeout=60)
    assert result.ok
    assert (len(result.stdout), len(result.stderr)) == (BIG, BIG)
    assert set(result.stdout) == {ord("o")} and set(result.stderr) == {ord("e")}


def test_input_is_handed_over_byte_exact() -> None:
    given = os.urandom(4096) + b"\0\xff\n"
    assert stockade.run(["cat"], input=given).stdout == given


def test_five_megabytes_go_in_and_come_out() -> None:
    given = os.urandom(BIG)
    result = stockade.run(["cat"], input=given, timeout=60)
    assert result.ok and result.stdout == given


def test_without_input_the_program_reads_an_empty_one() -> None:
    assert stockade.run(["cat"], timeout=30).stdout == b""


def test_a_program_that_never_reads_its_input_ends_all_the_same() -> None:
    result = stockade.run(["true"], input=b"x" * BIG, timeout=30)
    assert result.ok


def test_a_program_that_closes_its_input_early_goes_on() -> None:
    result = stockade.run(["sh", "-c", "head -c 3; exec 0<&-; echo done"], input=b"abc" * BIG, timeout=30)
    assert result.ok and result.text.endswith("done\n")


def test_a_descriptors_content_is_handed_in() -> None:
    reader, writer = os.pipe()
    feeding = threading.Thread(target=lambda: (os.write(writer, b"through a pipe"), os.close(writer)))
    feeding.start()
    try:
        assert run_once(["cat"], None, {"timeout": 30}, RunExtras(stdin=reader)).stdout == b"through a pipe"
    finally:
        feeding.join()
        os.close(reader)


def test_a_terminal_is_never_handed_in() -> None:
    ours, theirs = os.openpty()
    try:
        with pytest.raises(PolicyError, match="terminal"):
            run_once(["cat"], None, {}, RunExtras(stdin=theirs))
    finally:
        os.close(ours)
        os.close(theirs)


def test_callbacks_get_the_output_while_the_program_runs() -> None:
    arrived: list[tuple[float, bytes]] = []
    script = "echo first; sleep 0.5; echo second; echo error >&2"
    errors: list[bytes] = []
    result = stockade.run(
        ["sh", "-c", script],
        on_stdout=lambda data: arrived.append((time.monotonic(), data)),
        on_stderr=errors.append,
    )
    assert b"".join(data for _, data in arrived) == result.stdout == b"first\nsecond\n"
    assert b"".join(errors) == result.stderr == b"error\n"
    assert arrived[-1][0] - arrived[0][0] > 0.3


def test_an_exception_in_a_callback_ends_the_run_and_comes_through() -> None:
    def fail(_: bytes) -> None:
        raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        stockade.run(["sh", "-c", "echo x; sleep 60"], on_stdout=fail)
    assert time.monotonic() - began < 30


def test_output_past_the_limit_is_cut_and_flagged() -> None:
    result = stockade.run(["head", "-c", "5000", "/dev/zero"], Policy(limits={"output": 1000}))
    assert result.ok and result.truncated
    assert result.stdout == bytes(1000)


def test_output_of_exactly_the_limit_is_whole() -> None:
    result = stockade.run(["head", "-c", "1000", "/dev/zero"], Policy(limits={"output": 1000}))
    assert not result.truncated and len(result.stdout) == 1000


def test_the_limit_counts_for_each_stream() -> None:
    script = "head -c 900 /dev/zero; head -c 1100 /dev/zero >&2"
    result = stockade.run(["sh", "-c", script], Policy(limits={"output": 1000}))
    assert (len(result.stdout), len(result.stderr), result.truncated) == (900, 1000, True)


def test_a_callback_gets_also_what_is_past_the_limit() -> None:
    seen = 0

    def count(data: bytes) -> None:
        nonlocal seen
        seen += len(data)

    result = stockade.run(
        ["head", "-c", "300000", "/dev/zero"], Policy(limits={"output": "1K"}), on_stdout=count
    )
    assert (seen, len(result.stdout)) == (300000, 1024)


def test_memory_is_bounded_however_much_is_printed() -> None:
    stockade.run(["true"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = stockade.run(["head", "-c", "400M", "/dev/zero"], Policy(limits={"output": "1M"}), timeout=60)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result.truncated and len(result.stdout) == MEBIBYTE
    assert grown < 64 * 1024, f"grew by {grown} KiB"


def test_a_daemon_that_keeps_the_streams_open_does_not_keep_the_run() -> None:
    began = time.monotonic()
    result = stockade.run(["sh", "-c", "setsid sleep 60 & echo started"], timeout=30)
    assert result.ok and result.text == "started\n"
    assert time.monotonic() - began < 20
