"""The file that `stockade run --receipt` writes.

It may lie where the program can write. So Stockade opens the directory before
the run, and afterwards replaces whatever has the file's name: the program
cannot swap either. Nor can a link redirect the receipt: one in the current
directory, in a repository or in what programs may write does not lead the
receipt out of it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from stockade.errors import PolicyError, ReceiptError, StockadeError, one_line, typed

if TYPE_CHECKING:
    from stockade.receipt.statement import Receipt

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def receipt_written_to(path: str, writable: Sequence[str] = ()) -> Iterator[Callable[[Receipt | None], None]]:
    """Yield a function that writes the receipt to a file; check before the run that this is possible.

    The receipt of a refused run is written too. `writable` are the directories that the command line lets
    programs write.
    """
    parent, name = os.path.split(path)
    try:
        place = _directory(parent, path, writable)
    except OSError as error:
        raise PolicyError(
            f"--receipt {path}: cannot open the directory {parent}: {error.strerror}",
            hint=f"nothing was run; make the directory, or name another: mkdir -p {typed(parent)}",
        ) from None
    kept = False

    def keep(receipt: Receipt | None) -> None:
        nonlocal kept
        if receipt is None:
            return
        try:
            if not os.path.samestat(os.stat(parent or "."), os.fstat(place)):
                raise OSError(0, f"{parent} is not the same directory as before the run")
            _replace(place, name, receipt.with_head().encode() + b"\n")
        except OSError as error:
            raise ReceiptError(
                f"cannot write the receipt to {path}: {error.strerror}",
                failure="not-made",
                hint=f"it is in the log: stockade receipts export {receipt.id}",
            ) from None
        kept = True

    try:
        _refuse_unless_file(place, name, path)
        os.unlink(_write_new(place, name, b""), dir_fd=place)
        # Remove an older receipt now: it must not pass for that of this run.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
        try:
            yield keep
        except StockadeError as error:
            keep(error.receipt)
            raise
        finally:
            if not kept:  # the program may have put a false receipt there
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=place)
    finally:
        os.close(place)


def _directory(parent: str, path: str, writable: Sequence[str]) -> int:
    """Open the directory for the receipt; refuse a link that leads out of a project."""
    from stockade.linux.path_lookup import look_up
    from stockade.linux.user import Caller
    from stockade.resolve.paths.links import Bounds

    caller = Caller.current()
    trees = tuple(os.path.realpath(tree) for tree in writable)
    bounds = Bounds("", trees, caller.cwd, os.path.realpath(caller.home or "/"))
    found = look_up(os.path.join(caller.cwd or "/", parent))
    try:
        if (out := bounds.exit(found)) is not None:
            reason = f"the link {out.link.at} leads to {out.link.leads}, out of {out.tree}{out.why}"
            wanted = os.path.join(found.name, os.path.basename(path))
            raise PolicyError(
                one_line(f"--receipt {path}: {reason}"),
                hint=one_line(
                    f"remove the link; if you mean its target, name that: --receipt {typed(wanted)}"
                ),
            )
        if found.error is not None:
            raise found.error
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found.fd)
    finally:
        found.close()


def _refuse_unless_file(place: int, name: str, path: str) -> None:
    """Refuse to replace anything but a regular file, also a link: it may lead to a file of the user's."""
    try:
        mode = os.stat(name or ".", dir_fd=place, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device or pipe"
        raise PolicyError(f"--receipt {path} is {what}", hint="name a new file, or a regular file to replace")


def _replace(place: int, name: str, data: bytes) -> None:
    part = _write_new(place, name, data)
    try:
        os.rename(part, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        os.unlink(part, dir_fd=place)
        raise


def _write_new(place: int, name: str, data: bytes) -> str:
    """Write the data to a new file beside the name, and return the new file's name."""
    part = f".{name[:200]}.{os.urandom(6).hex()}"
    file = os.open(part, NEW, 0o666, dir_fd=place)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
    except OSError:
        os.unlink(part, dir_fd=place)
        raise
    return part
