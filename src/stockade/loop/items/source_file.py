"""The bytes of a source of work items, bounded: a file, or what a command prints."""

from __future__ import annotations

import os
import stat

from stockade.linux.plain_text import clean_line
from stockade.loop.items.item import ItemsError

#: The most bytes of a source.
MOST_BYTES = 16 << 20
#: How long a command that prints items may take, in seconds.
PATIENCE = 120.0


def read_text(path: str) -> str:
    """Read a regular file of at most `MOST_BYTES`, as UTF-8. Never blocks."""
    shown = clean_line(path)
    try:
        # Opening a pipe would otherwise block until a process writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ItemsError(f"{shown} is not a regular file", hint="name a file of work items")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ItemsError(f"cannot read {shown}: {error.strerror}", hint="check the path") from error
    return as_text(data, shown)


def as_text(data: bytes, shown: str) -> str:
    """Decode a source, which is UTF-8 and at most `MOST_BYTES` long."""
    if len(data) > MOST_BYTES:
        raise ItemsError(f"{shown} has more than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ItemsError(f"{shown} is not UTF-8 text: byte {error.start}") from None


def printed_by(command: str, *, patience: float = PATIENCE) -> str:
    """Run a command of the user's on the host and return what it prints."""
    import contextlib
    import signal
    import subprocess
    import tempfile

    shown = f"the command {clean_line(command[:200])}"
    # A file instead of a pipe: what the command leaves running cannot keep us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0
        )
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            raise ItemsError(
                f"{shown} did not end in {patience:g} seconds", hint="run it by hand, and name a file instead"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        if code:
            words = err.read(500).decode("utf-8", "replace").strip()
            raise ItemsError(
                f"{shown} failed with exit code {code}" + (f": {clean_line(words)}" if words else ""),
                hint="run it by hand to see why",
            )
        return as_text(out.read(MOST_BYTES + 1), shown)
