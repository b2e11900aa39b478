"""Turn the kernel's errors about a sandbox's files into errors that say what to change."""

from __future__ import annotations

import errno
import os

from stockade.errors import DeniedError, LimitError, NotFoundError, PolicyError, SetupError, StockadeError

_MISSING = {
    errno.ENOENT: "no such file inside",
    errno.ENOTDIR: "a part of it is not a directory",
}
_DENIED = {
    errno.EROFS: ("it is read-only inside", "write into the workspace or /tmp, or grant it with `write`"),
    errno.EACCES: (
        "permission denied",
        "`chmod` the file or its directory; root has no more rights here than inside",
    ),
    errno.EPERM: ("you may not open or change it", "use a file that the program itself could use"),
    errno.ELOOP: ("a link in the path leads nowhere, or through /proc", "name the file itself"),
    errno.EXDEV: (
        "it leads out of the workspace, and the rest of the sandbox has ended",
        "name the file itself",
    ),
    errno.ENXIO: ("it is a pipe, a socket or a device, not a file", "let a program inside read or write it"),
    errno.EBUSY: ("it is in use or mounted", "try again, or choose another place"),
    errno.ETXTBSY: ("it is being executed", "replace it with `write` instead of appending to it"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG = {
    errno.EEXIST: ("it exists already", "remove it first, or allow overwriting it"),
    errno.EISDIR: ("it is a directory", "name a file in it"),
    errno.ENOTEMPTY: (
        "it is a directory that is not empty",
        "pass `recursive=True` to remove it with everything in it",
    ),
    errno.EINVAL: ("the path is not valid for this operation", "a directory cannot be moved into itself"),
    errno.ENAMETOOLONG: ("a name in it is longer than 255 bytes", "choose shorter names"),
}


def refusal(error: OSError, path: str) -> StockadeError:
    """Return the error to raise for a call that the kernel has refused."""
    code = error.errno or 0
    if code in _MISSING:
        return NotFoundError(f"{path}: {_MISSING[code]}", hint="`files.list` shows which files exist")
    if code in _FULL:
        return LimitError(
            f"{path}: {os.strerror(code)}", hint="remove files that you do not need, or raise limits.disk"
        )
    for table, kind in ((_DENIED, DeniedError), (_WRONG, PolicyError)):
        if code in table:
            words, hint = table[code]
            what = error.strerror if error.strerror != os.strerror(code) else words
            return kind(f"{path}: {what}", hint=hint)
    return SetupError(f"{path}: {error.strerror}", stage="files", errno=code)
