"""Processes that are killed before one of their calls that change something."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

#: Every call by which something of a workspace or of the host's tree is changed.
CALLS = (
    "chmod", "chown", "copy_file_range", "fchmod", "fchown", "fsync", "ftruncate", "link", "mkdir", "mknod",
    "open", "pwrite", "removexattr", "rename", "replace", "rmdir", "setxattr", "symlink", "unlink", "utime",
    "write",
)  # fmt: skip


def tripwire(number: int) -> None:
    """Make this process kill itself before its call of that number that changes something."""
    left = [number]

    def watched(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counting(*words: Any, **options: Any) -> Any:
            if name != "open" or (len(words) > 1 and words[1] & os.O_CREAT):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return call(*words, **options)

        return counting

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name), name))


def killed(number: int, action: Callable[[], object]) -> bool:
    """Whether a child that does it was killed before its call of that number."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            tripwire(number)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
