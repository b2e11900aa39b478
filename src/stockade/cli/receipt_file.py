"""The file that `stockade run --receipt` writes.

It may lie where the program can write. So nothing is opened there that the
program could exchange: the directory is held from before the run, and what
stands at the name after it gives way to the receipt.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stockade.errors import PolicyError, ReceiptError, StockadeError

if TYPE_CHECKING:
    from stockade.receipt.statement import Receipt

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def kept_in(path: str) -> Iterator[Callable[[Receipt | None], None]]:
    """Takes the receipt to a file, also that of a run that is refused. That it can is seen before the run."""
    parent, name = os.path.split(path)
    place = os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kept = False

    def keep(receipt: Receipt | None) -> None:
        nonlocal kept
        if receipt is None:
            return
        try:
            if not os.path.samestat(os.stat(parent or "."), os.fstat(place)):
                raise OSError(0, f"{parent} is another directory than before the run")
            _replace(place, name, receipt.encode() + b"\n")
        except OSError as error:
            raise ReceiptError(
                f"the receipt cannot be written to {path}: {error.strerror}",
                failure="not-made",
                hint=f"it is in the log: stockade receipts export {receipt.id}",
            ) from None
        kept = True

    try:
        _refuse(place, name, path)
        os.unlink(_written(place, name, b""), dir_fd=place)
        # Gone at once: an older receipt must not be taken for that of this run.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
        try:
            yield keep
        except StockadeError as error:
            keep(error.receipt)
            raise
        finally:
            if not kept:  # what the program has put there is not it
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=place)
    finally:
        os.close(place)


def _refuse(place: int, name: str, path: str) -> None:
    """Only a file gives way, and no link is followed: a project could lay one to a file of yours."""
    try:
        mode = os.stat(name or ".", dir_fd=place, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device or pipe"
        raise PolicyError(f"--receipt {path}: is {what}", hint="name a file, new or to be replaced")


def _replace(place: int, name: str, data: bytes) -> None:
    part = _written(place, name, data)
    try:
        os.rename(part, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        os.unlink(part, dir_fd=place)
        raise


def _written(place: int, name: str, data: bytes) -> str:
    """A new file beside the name, and what it is called."""
    part = f".{name[:200]}.{os.urandom(6).hex()}"
    file = os.open(part, NEW, 0o666, dir_fd=place)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
    except OSError:
        os.unlink(part, dir_fd=place)
        raise
    return part
