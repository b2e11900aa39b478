"""For programs inside a sandbox whose policy has `delegate = true`: ask for a further sandbox.

It needs only Python's standard library, so that the file can be copied into
any sandbox.

    import stockade

    answer = stockade.inside.delegate(["python3", "-"], {"limits": {"wall": "5s"}}, input=b"print(6 * 7)")
    answer["stdout"]        # b"42\\n"
"""

from __future__ import annotations

import base64
import json
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "STOCKADE_DELEGATE"
_lock = threading.Lock()


def delegate(
    cmd: Sequence[str],
    policy: Mapping[str, Any] | None = None,
    *,
    input: bytes = b"",
    cwd: str = "",
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run a command in a sandbox beside this one, with no more than this one has, and wait for its end.

    The answer has outcome, exit_code, stdout, stderr and receipt. A refused request raises PermissionError.
    Sandboxes are made one at a time, and end with the run that asked for them.
    """
    place = os.environ.get(VARIABLE, "")
    if not place:
        raise PermissionError(f"{VARIABLE} is not set: the policy of this sandbox needs delegate = true")
    asks, answers = (int(number) for number in place.split(","))
    request = {
        "command": list(cmd),
        "policy": dict(policy or {}),
        "input": base64.b64encode(input).decode(),
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
    for stream in ("stdout", "stderr"):
        answer[stream] = base64.b64decode(answer.get(stream, ""))
    return answer


def _read(end: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(end, size - len(data))
        if not part:
            raise ConnectionError("the supervisor has closed the connection")
        data += part
    return data
