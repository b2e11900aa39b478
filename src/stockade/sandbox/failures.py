"""What to say where the gate has refused to raise the walls."""

from __future__ import annotations

import errno
import os

from stockade.errors import SetupError, UnsupportedError
from stockade.gate import client

#: What to tell a user about a failure that is likelier theirs than ours.
HINTS = {
    ("view", errno.EINVAL): "its file system cannot be shown through an overlay: copy what is needed, "
    "or, if it is the install of the command, do without: --no-toolchain",
    ("mask", errno.EACCES): "it is in a directory that you may not enter: deny that one",
    ("bind", errno.ENOENT): "it was removed after it was looked up: try again",
    ("bind", errno.ELOOP): "a directory on the way was replaced by a link after it was looked up",
    ("bind", errno.ESTALE): "another file has taken its place since it was looked up: try again",
    (
        "overlay",
        errno.EINVAL,
    ): 'the file system cannot be the lower layer of an overlay: use mode "ro" or "rw"',
    ("keyring", errno.EDQUOT): "each sandbox takes one of this user's keys: see sysctl kernel.keys.maxkeys",
    ("namespaces", errno.EPERM): "`stockade doctor` says what keeps user namespaces from being made",
    ("namespaces", errno.ENOSPC): "the limit of namespaces is reached: see sysctl user.max_user_namespaces",
}


def no_copies(backend: str) -> UnsupportedError:
    """The first process of that backend's sandboxes cannot be a copy of a template."""
    return UnsupportedError(
        f"warm Python: the {backend} backend does not make its sandboxes by copying a template",
        hint='write backend = "native" or "landlock", or run python3 as a command',
    )


def failure(reply: client.Reply) -> SetupError:
    """The gate's refusal as an error, with what to do about it."""
    what = f" {reply.text}" if reply.text else ""
    why = os.strerror(reply.error)
    if reply.error == errno.ESTALE:
        why = "it is not the same file any more"
    return SetupError(
        f"nothing was run: {reply.operation}{what}: {why}",
        stage=reply.operation,
        errno=reply.error,
        hint=HINTS.get((reply.operation, reply.error), "`stockade doctor` shows what this machine can do"),
    )
