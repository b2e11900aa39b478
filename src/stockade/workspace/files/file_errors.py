"""Turn the kernel's errors about a sandbox's files into errors that say what to change."""

from __future__ import annotations

import errno
import os

from stockade.errors import (
    DeniedError,
    DiskFullError,
    FileError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotFoundError,
    StockadeError,
)

_DENIED = {
    errno.EROFS: ("it is read-only inside", "write into the workspace or /tmp, or grant it with `write`"),
    errno.EACCES: (
        "permission denied",
        "`chmod` it, or pass `replace=True` to `write`; root has no more rights here than inside",
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
_FULL = ("", "remove files that you do not need, or raise limits.disk")
#: What the kernel says, the error for it, its words (empty: the kernel's own) and the hint.
_REFUSALS: dict[int, tuple[type[StockadeError], str, str]] = {
    errno.ENOENT: (NotFoundError, "no such file inside", "`files.list` shows which files exist"),
    errno.ENOTDIR: (
        NotADirectoryError,
        "it is not a directory, or a part of it is not",
        "`files.info` shows what a path is",
    ),
    errno.EISDIR: (IsADirectoryError, "it is a directory", "name a file in it"),
    errno.EEXIST: (FileExistsError, "it exists already", "remove it first, or allow overwriting it"),
    errno.ENOTEMPTY: (
        FileError,
        "it is a directory that is not empty",
        "pass `recursive=True` to remove it with everything in it",
    ),
    errno.EINVAL: (
        FileError,
        "the path is not valid for this operation",
        "a directory cannot be moved into itself",
    ),
    errno.ENAMETOOLONG: (FileError, "a name in it is longer than 255 bytes", "choose shorter names"),
    **{code: (DeniedError, *words) for code, words in _DENIED.items()},
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (DiskFullError, *_FULL)),
}


def refusal(error: OSError, path: str) -> StockadeError:
    """Return the error to raise for a call that the kernel has refused."""
    code = error.errno or 0
    kind, words, hint = _REFUSALS.get(code, (FileError, "", ""))
    # The caller may know better than the kernel what is wrong.
    own_words = error.strerror if error.strerror != os.strerror(code) else ""
    refused = kind(f"{path}: {own_words or words or error.strerror}", hint=hint)
    assert isinstance(refused, OSError)
    refused.errno, refused.strerror, refused.filename = code, os.strerror(code), path
    return refused
