"""Hostile functions: what comes out of a sandbox is data, whatever the code inside says."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import pytest

from stockade import LimitError, SandboxExecutor, StockadeError
from stockade.functions import channel, packing, reply
from stockade.functions.reply import FunctionError
from stockade.functions.sandboxed_function import call
from stockade.inside import encoder
from support import jobs, points

GRACE = {"grace": 0, "timeout": 30}


def encoded(value: Any) -> bytes:
    return encoder.encode(value, 1 << 20)


def test_a_pickle_bomb_in_a_result_is_never_executed_here(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(FunctionError, match="refused"):
        call(jobs.hostile, ("pickle", f"echo bang > {mark}".encode()), **GRACE)
    with pytest.raises(FunctionError, match="not plain data"):
        call(jobs.echo, (pickle.loads(pickle.dumps(jobs.Bomb)),), **GRACE)
    assert not mark.exists()
    # The control: trust_results=True trusts the sandbox, and this is what that means.
    call(jobs.hostile, ("pickle", f"echo bang > {mark}".encode()), trust_results=True, **GRACE)
    assert mark.read_text() == "bang\n"


@pytest.mark.parametrize(
    ("what", "data", "why"),
    [
        ("raw", b"garbage " * 1000, "impossible length"),
        ("raw", b"\0\0\0\x30" + bytes(48), "not what the other end sealed"),
        ("record", b"V" + encoded(1), "an unknown kind"),  # it is no generator
        ("record", b"Xanything", "an unknown kind"),
        ("early", b"l\xff" + b"\xff" * 8, "a length exceeds"),
        ("after", encoded("forged"), "did not exit"),
    ],
    ids=["garbage", "forged", "yielded", "unknown", "announced", "staying"],
)
def test_what_breaks_the_rules_is_refused(
    what: str, data: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PATIENCE", 0.2)
    with pytest.raises(FunctionError, match=why) as caught:
        call(jobs.hostile, (what, data), **GRACE)
    assert caught.value.result is not None and caught.value.result.receipt is not None


def test_a_second_answer_changes_nothing() -> None:
    assert call(jobs.hostile, ("early", encoded("first")), **GRACE).value == "first"


def test_a_record_without_an_end_is_refused_when_it_is_too_large() -> None:
    with pytest.raises(LimitError):
        call(jobs.hostile, ("record", b"R" + bytes(3 << 20)), max_result="1M", **GRACE)


def failed(**said: Any) -> bytes:
    whole = {"type": "builtins:KeyError", "message": "", "text": "", "args": b"", "stage": "function"}
    return encoder.encode({**whole, **said}, 32 << 20)


def test_an_exception_that_is_none_or_too_long_to_show_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "MOST_TEXT", 1000)
    taken = reply.ReturnTypes(trust=False, max_result=1 << 20, types={})
    for wrong in ({"type": 10**5000}, {"args": [300]}, {"args": list(encoded(("x",)))}, {"stage": None}):
        error = reply.raised(bytearray(failed(**wrong)), taken, begun=True)
        assert "it is not a valid exception" in str(error)
    for long in ({"type": "x:" + "\x1b" * 9999}, {"text": "\x1b" * 9999}):
        told: Any = reply.raised(bytearray(failed(**long)), taken, begun=True)
        assert len(str(told)) < 3000 and len(told.traceback) <= 4000 and "\x1b" not in told.traceback


def test_a_task_cannot_break_the_executor_for_the_others() -> None:
    """It says that the initializer failed, after which no task would be taken."""
    with SandboxExecutor(max_workers=1, initializer=jobs.make_ready, initargs=("",)) as executor:
        for stage in ("initializer", "arguments"):
            error = executor.submit(jobs.hostile, "failed", failed(stage=stage)).exception()
            assert isinstance(error, FunctionError) and not isinstance(error, BrokenExecutor)
        assert executor.submit(pow, 2, 2).result() == 4


def test_an_announced_class_that_is_another_one_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FunctionError, match="Trap is a dataclass that was not declared"):
        call(points.sprung, (str(tmp_path / "sprung"),))
    assert not (tmp_path / "sprung").exists()


def test_no_key_is_in_the_arguments_the_environment_or_a_file() -> None:
    found = call(jobs.seen).value
    assert len(found["keys"]) >= 1 and found["files"] == []  # the function finds its own in memory
    for key in found["keys"]:
        for place in ("argv", "environ"):
            assert key not in found[place] and key.hex().encode() not in found[place]


def test_where_nothing_can_be_sealed_inside_nothing_is_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(channel.FunctionChannel):
        def begin(self, *given: Any) -> None:
            super().begin(*given)
            assert self._request

        def boot(self) -> str:
            # As for another Python than this one, which compiles the text itself.
            self._text = self._text.replace(packing.MAGIC_NUMBER, b"none", 1)
            for name in (b"libcrypto.so", b"import _hashlib", b"from cryptography"):
                assert name in self._text
                self._text = self._text.replace(name, name[:-1] + b"_")
            self._outgoing = iter([b"%09d" % len(self._text) + self._text])
            return super().boot()

    monkeypatch.setattr("stockade.functions.sandboxed_function.FunctionChannel", Without)
    with pytest.raises(FunctionError, match=r"inside, .* neither OpenSSL .* nor the package") as caught:
        call(jobs.add, (1,))
    assert "libcrypto" in caught.value.hint and b"adding" not in caught.value.result.stdout  # type: ignore[union-attr]


class Wire(channel.FunctionChannel):
    """A wire on which somebody listens, or more."""

    heard: bytearray
    change: Callable[[bytes], bytes] | None = None

    def _hear(self, data: bytes) -> None:
        type(self).heard += data
        super()._hear(data if self.change is None else type(self).change(data))  # type: ignore[misc]


def test_whoever_listens_learns_nothing_and_whoever_changes_a_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stockade.functions.sandboxed_function.FunctionChannel", Wire)
    written = bytearray()
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        count = real(descriptor, data)
        written.extend(bytes(data)[:count])
        return count

    monkeypatch.setattr(channel.os, "write", write)
    Wire.heard = bytearray()
    secret = b"a secret that nobody else reads"
    assert call(jobs.echo, (secret,)).value == secret
    assert len(Wire.heard) > 64 and len(written) > 1000
    assert secret not in Wire.heard and secret not in written
    Wire.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])  # in the key, then in every message
    try:
        with pytest.raises(FunctionError):
            call(jobs.echo, (secret,), **GRACE)
    finally:
        Wire.change = None


def test_a_worker_takes_no_other_text_than_the_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could write into the pipe first would have their own code run there, and be trusted."""

    class Other(channel.FunctionChannel):
        def begin(self, *given: Any) -> None:
            text = b"import os; os.write(4, b'=' + bytes(32))"
            self._outgoing = iter([b"%09d" % len(text) + text])
            super().begin(*given)

    monkeypatch.setattr("stockade.functions.sandboxed_function.FunctionChannel", Other)
    with pytest.raises(StockadeError, match="exited with 1"):
        call(jobs.add, (1,))


def test_a_worker_that_reads_no_arguments_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies while it is still being told its arguments holds nobody."""

    class Short(channel.FunctionChannel):
        def boot(self) -> str:
            end = "os.write(4, b'=' + os.urandom(32)); os.read(3, 1); os._exit(0)"
            return super().boot().replace("import marshal", end)

    monkeypatch.setattr("stockade.functions.sandboxed_function.FunctionChannel", Short)
    with pytest.raises(StockadeError, match="the interpreter of the function ended"):
        call(jobs.echo, (bytes(8 << 20),))
