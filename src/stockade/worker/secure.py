"""`SecureBuffer`: memory for a secret that is not written to disk, not dumped, not inherited, and wiped."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from stockade.errors import LimitError, PolicyError, SetupError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

#: For a forked child the memory is zeros (Linux 4.14): it need not know that it must not look.
WIPE_ON_FORK = 18
DO_NOT_DUMP = 16


class SecureBuffer:
    """Memory that is locked, left out of core dumps, empty in forked children, and wiped when it is closed.

    >>> from stockade import SecureBuffer
    >>> with SecureBuffer(b"swordfish") as secret:
    ...     bytes(secret.view[:5])
    b'sword'

    Made of a size it is zeros; made of a bytearray it takes the content over and wipes the bytearray. What
    it is made of otherwise, and whatever is copied out of it, is the caller's to mind. A forked child that
    asks for it is told that it has none (`SetupError`); a view from before the fork shows it zeros.
    """

    def __init__(self, content: int | Buffer) -> None:
        size = content if isinstance(content, int) else memoryview(content).nbytes
        if isinstance(content, bool) or size < 1:
            raise PolicyError(f"a buffer of {size} bytes holds nothing", hint="give it a size, or a secret")
        self._size = size
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._memory: mmap.mmap | None = _mapped(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._view = memoryview(self._memory)[:size]
        try:
            self._memory.madvise(DO_NOT_DUMP)
            self._memory.madvise(WIPE_ON_FORK)
            self._address = _address(self._memory)
            self._wipe, self._unlock = _locked(self._address, len(self._memory))
        except OSError as error:
            self._let_go()
            raise SetupError(
                f"this memory cannot be protected: {error.strerror}", stage="memory", errno=error.errno or 0
            ) from None
        except BaseException:
            self._let_go()
            raise
        if not isinstance(content, int):
            source = memoryview(content).cast("B")
            self._view[:] = source
            if isinstance(content, bytearray):
                source[:] = bytes(size)

    def __enter__(self) -> SecureBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<SecureBuffer of {self._size} bytes{', closed' if self.closed else ''}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecureBuffer is not copied or pickled")

    @property
    def closed(self) -> bool:
        """Whether it was wiped."""
        return self._memory is None

    @property
    def view(self) -> memoryview:
        """The memory itself, to be read and written."""
        if self._memory is None:
            raise ValueError("the buffer was closed")
        if self._owner != os.getpid():
            raise SetupError(
                "the buffer is that of the process that made it: a forked child has zeros there, not locked",
                stage="memory",
                hint="make another one in the child",
            )
        return self._view

    def close(self) -> None:
        """Wipe it, then unlock it, then give it back; harmless when repeated.

        A view that somebody still holds then shows zeros.
        """
        with self._lock:
            if self._memory is None:
                return
            # Found when it was made: at the end of the interpreter nothing can be loaded.
            self._wipe(self._address, 0, len(self._memory))
            self._unlock(self._address, len(self._memory))
            self._let_go()

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        with contextlib.suppress(BufferError):  # it goes with the last view of it
            self._view.release()
            if memory is not None:
                memory.close()


def _mapped(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise LimitError(f"{size} bytes are not to be had: {error}", hint="keep less") from None


def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("mlock", "munlock"):
        getattr(libc, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _locked(address: int, size: int) -> tuple[Any, Any]:
    """Keep the memory from being swapped out, or say why that is not allowed; what wipes and unlocks it."""
    import ctypes
    import resource

    libc = _libc()
    if libc.mlock(address, size) == 0:
        return ctypes.memset, libc.munlock
    number = ctypes.get_errno()
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    raise LimitError(
        f"{size} bytes cannot be locked ({os.strerror(number)}): this process may lock {most} bytes in all",
        hint="raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK= of a service), or keep less",
    )
