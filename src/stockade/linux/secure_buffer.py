"""`SecureBuffer`: memory for a secret: never swapped, dumped or inherited, and wiped when closed."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import Any, NoReturn

from stockade.errors import LimitError, PolicyError, SetupError

#: MADV_WIPEONFORK (Linux 4.14): in a forked child the memory is zeros, whatever the child does.
WIPE_ON_FORK = 18
DO_NOT_DUMP = 16


class SecureBuffer:
    """Memory that is locked, left out of core dumps, zero in forked children, and wiped when closed.

    >>> from stockade.functions import SecureBuffer
    >>> with SecureBuffer(b"swordfish") as secret:
    ...     bytes(secret.view[:5])
    b'sword'

    Made from a size, it is zeros; made from a bytearray, it copies the content and wipes the bytearray. You
    must protect any other source, and every copy that you take out of it. In a forked child `view` raises a
    `SetupError`; a view from before the fork shows zeros there.
    """

    def __init__(self, content: int | bytes | bytearray | memoryview) -> None:
        size = content if isinstance(content, int) else memoryview(content).nbytes
        if isinstance(content, bool) or size < 1:
            raise PolicyError(
                f"a SecureBuffer cannot have {size} bytes", hint="pass a size of at least 1, or a secret"
            )
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
                f"the kernel cannot protect this memory: {error.strerror}",
                stage="memory",
                errno=error.errno or 0,
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
        raise TypeError("a SecureBuffer cannot be copied or pickled")

    @property
    def closed(self) -> bool:
        """Whether it was closed, and so wiped."""
        return self._memory is None

    @property
    def view(self) -> memoryview:
        """The memory itself, to read and write."""
        if self._memory is None:
            raise ValueError("the buffer was closed")
        if self._owner != os.getpid():
            raise SetupError(
                "the buffer belongs to the process that made it: a forked child has unlocked zeros instead",
                stage="memory",
                hint="make another SecureBuffer in the child",
            )
        return self._view

    def close(self) -> None:
        """Wipe the memory, unlock it and free it; harmless when repeated.

        A view that you still hold shows zeros from then on.
        """
        with self._lock:
            if self._memory is None:
                return
            # These were looked up at the start: at the interpreter's exit nothing can be loaded.
            self._wipe(self._address, 0, len(self._memory))
            self._unlock(self._address, len(self._memory))
            self._let_go()

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        with contextlib.suppress(BufferError):  # the last view frees the memory
            self._view.release()
            if memory is not None:
                memory.close()


def _mapped(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise LimitError(
            f"the kernel cannot provide {size} bytes of memory: {error}", hint="make a smaller SecureBuffer"
        ) from None


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
    """Lock the memory against swapping; return the functions that wipe and unlock it."""
    import ctypes

    libc = _libc()
    if libc.mlock(address, size) == 0:
        return ctypes.memset, libc.munlock
    number = ctypes.get_errno()
    raise LimitError(
        f"{size} bytes cannot be locked ({os.strerror(number)}){_limit()}",
        hint="raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK= of a service), or make a smaller SecureBuffer",
    )


def _limit() -> str:
    """Say how much this process may lock; an egress process, which cannot ask, says nothing."""
    try:
        import resource

        return f": this process may lock {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]} bytes in all"
    except (ImportError, OSError, ValueError):
        return ""
