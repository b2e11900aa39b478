"""Memory for secrets: locked, not dumped, not inherited, wiped and then unlocked."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from stockade import LimitError, PolicyError, SetupError
from stockade.functions import SecureBuffer


def flags(address: int) -> tuple[set[str], int]:
    """What the kernel says of the memory at an address: its flags, and how much of it is locked."""
    locked, found = 0, False
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                found = begin <= address < end
            elif found and first == "Locked:":
                locked = int(line.split()[1])
            elif found and first == "VmFlags:":
                return set(line.split()[1:]), locked
    return set(), 0


def test_it_is_locked_not_dumped_and_not_inherited() -> None:
    with SecureBuffer(b"swordfish") as secret:
        assert bytes(secret.view) == b"swordfish" and len(secret) == 9 and "swordfish" not in repr(secret)
        kinds, locked = flags(secret._address)
        assert {"lo", "dd", "wf"} <= kinds and locked == 4  # locked, no dump, wiped on fork
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            with pytest.raises(SetupError, match="the process that made it"):
                secret.view  # noqa: B018
            os.write(write, bytes(secret._view))
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == bytes(9)
        os.close(read)
        os.close(write)


def test_closed_it_is_wiped_first_and_then_unlocked() -> None:
    secret = SecureBuffer(10000)
    secret.view[:] = b"s" * 10000
    held, address, order = secret.view[5000:5010], secret._address, []
    unlock = secret._unlock

    def unlocking(place: int, size: int) -> int:
        order.append((ctypes.string_at(place, size) == bytes(size), flags(place)[1] > 0, size))
        return int(unlock(place, size))

    secret._unlock = unlocking
    secret.close()
    assert order == [(True, True, 12288)]
    assert bytes(held) == bytes(10)  # somebody still holds a view: the memory is there, and empty
    assert ctypes.string_at(address, 10000) == bytes(10000) and flags(address)[1] == 0
    assert secret.closed
    with pytest.raises(ValueError, match="closed"):
        secret.view  # noqa: B018
    secret.close()
    held.release()


def test_closed_while_somebody_reads_it_is_wiped_all_the_same() -> None:
    secret = SecureBuffer(b"swordfish")
    held = pickle.PickleBuffer(secret.view)
    secret.close()
    assert secret.closed and bytes(held) == bytes(9)


def test_a_bytearray_is_taken_over() -> None:
    source = bytearray(b"swordfish")
    with SecureBuffer(source) as secret:
        assert source == bytes(9) and bytes(secret.view) == b"swordfish"


def test_it_goes_nowhere_by_accident() -> None:
    with SecureBuffer(3) as secret:
        assert bytes(secret.view) == bytes(3)
        with pytest.raises(TypeError):
            pickle.dumps(secret)
    wrong: list[Any] = [0, -1, True, b""]
    for content in wrong:
        with pytest.raises(PolicyError, match="cannot have"):
            SecureBuffer(content)


LIMITED = """\
import ctypes, os, resource, stockade
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
if not os.getuid():  # root may lock what it wants
    os.setuid(65534)
one = stockade.functions.SecureBuffer(4096)
try:
    stockade.functions.SecureBuffer(8192)
except stockade.LimitError as error:
    print(error, "|", error.hint)
"""


def test_the_limit_of_locked_memory_is_a_clear_error() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("8192 bytes cannot be locked"), done.stderr
    assert "this process may lock 8192 bytes in all" in done.stdout and "ulimit -l" in done.stdout
    with pytest.raises(LimitError, match="cannot provide"):
        SecureBuffer(1 << 62)


def test_at_the_end_of_the_interpreter_it_is_wiped_quietly() -> None:
    code = "import stockade; kept = stockade.functions.SecureBuffer(b'x'); import sys; sys.kept = kept"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
