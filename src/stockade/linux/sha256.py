"""SHA-256 without OpenSSL: `hashlib` loads that first, which takes as long as hashing some hundred kilobytes.

Once this process has hashed that much, it loads OpenSSL, which is several times as fast.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import sha256
    from typing import Any
else:
    try:
        from _sha2 import sha256  # Python 3.12
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

__all__ = ["Sha256Stream", "hexdigest", "sha256"]

#: From so many bytes on that a process hashes, loading OpenSSL pays.
LONG = 1 << 18
#: Below so many bytes OpenSSL is no faster.
SHORT = 512


class _Total:
    """How many bytes `hexdigest` has hashed in this process."""

    hashed = 0


def hexdigest(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    _Total.hashed += len(data)
    if _Total.hashed <= LONG or len(data) < SHORT:
        return sha256(data).hexdigest()
    import hashlib

    return hashlib.sha256(data).hexdigest()


class Sha256Stream:
    """The SHA-256 of data that comes in pieces."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._size = 0
        self._long: Any = None

    def update(self, data: bytes) -> None:
        if self._long is not None:
            self._long.update(data)
            return
        self._size += len(data)
        self._kept.append(data)
        if self._size > LONG:
            import hashlib

            self._long = hashlib.sha256(b"".join(self._kept))
            self._kept.clear()

    def hexdigest(self) -> str:
        return hexdigest(b"".join(self._kept)) if self._long is None else str(self._long.hexdigest())
