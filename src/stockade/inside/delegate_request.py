"""For programs inside a sandbox whose policy has `delegate = true`: ask for a further sandbox.

It needs only Python's standard library, so that the file can be copied into
any sandbox.

    from stockade.inside import delegate

    result = delegate(["python3", "-"], {"limits": {"wall": "5s"}}, input="print(6 * 7)")
    result.ok, result.text        # (True, "42\\n")
"""

from __future__ import annotations

import base64
import json
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "STOCKADE_DELEGATE"
_lock = threading.Lock()


@dataclass(frozen=True)
class DelegatedResult:
    """How a delegated run ended: what `stockade.Result` has, as far as a program inside may know it.

    It has no usage, controls, changes and reasons, because those could name files of the host.
    """

    #: Why the run ended, such as "exited" and "timed-out".
    outcome: str
    exit_code: int
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    #: Whether output was left out, because it was too long for an answer.
    truncated: bool = False
    #: The hash of the receipt, which stays with the supervisor.
    receipt_hash: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command ran to its end and exited with 0."""
        return self.outcome == "exited" and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> DelegatedResult:
        """Return this result if it is `ok`; otherwise raise a RuntimeError that says how the run ended."""
        if self.ok:
            return self
        raise RuntimeError(f"the delegated run ended: {self.outcome}, exit code {self.exit_code}")


def delegate(
    cmd: Sequence[str],
    policy: Mapping[str, Any] | None = None,
    *,
    input: bytes | str = b"",
    cwd: str = "",
    timeout: float | None = None,
) -> DelegatedResult:
    """Run a command in a sandbox beside this one, with no more than this one has, and wait for its end.

    A refused request raises PermissionError. Sandboxes are made one at a time, and end with the run that
    asked for them.
    """
    place = os.environ.get(VARIABLE, "")
    if not place:
        raise PermissionError(f"{VARIABLE} is not set: the policy of this sandbox needs delegate = true")
    asks, answers = (int(number) for number in place.split(","))
    request = {
        "command": list(cmd),
        "policy": dict(policy or {}),
        "input": base64.b64encode(input.encode() if isinstance(input, str) else input).decode(),
        "cwd": cwd,
        "timeout": timeout,
    }
    data = json.dumps(request).encode()
    with _lock:
        view = memoryview(struct.pack("<I", len(data)) + data)
        while view:
            view = view[os.write(asks, view) :]
        (size,) = struct.unpack("<I", _read(answers, 4))
        answer: dict[str, Any] = json.loads(_read(answers, size))
    if "refused" in answer:
        raise PermissionError(answer["refused"])
    return DelegatedResult(
        outcome=answer["outcome"],
        exit_code=answer["exit_code"],
        signal=answer.get("signal"),
        stdout=base64.b64decode(answer.get("stdout", "")),
        stderr=base64.b64decode(answer.get("stderr", "")),
        truncated=answer.get("truncated", False),
        receipt_hash=answer.get("receipt", ""),
    )


def _read(end: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(end, size - len(data))
        if not part:
            raise ConnectionError("the supervisor has closed the connection")
        data += part
    return data
