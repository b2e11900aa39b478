"""The sealed channel between the supervisor and the Python inside.

Both ends make an X25519 key for this one run and agree on a secret. HKDF with
SHA-256 derives from it, and from everything that both have seen so far, one
AES-256-GCM key and one first nonce for each direction. Each message has its own
nonce, the first one xor its number; direction and number are authenticated
with it. So a message that was changed, repeated, moved, left out or sealed by
another process is refused. Keys exist only in the memory of the two processes.

This file is also sent inside and executed there by any Python from 3.8 on, so
it imports nothing of Stockade. The cryptography is that of the OpenSSL inside,
or of the package `cryptography`; without either, nothing is run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEY, NONCE, TAG = 32, 12, 16
#: The largest part of a record in one message, and how many messages one key may seal.
CHUNK, MOST = 1 << 18, 1 << 32
HEAD = struct.Struct(">I")
PROTOCOL = b"stockade sealed channel 1"
#: OpenSSL's numbers of X25519 and of two GCM controls.
X25519 = 1034
GET_TAG, SET_TAG = 0x10, 0x11
LIBRARIES = ("libcrypto.so.3", "libcrypto.so.1.1")


class SealError(Exception):
    """A message is not what the other end sealed, or this end cannot seal."""


def _hkdf(secret: bytes, salt: bytes, size: int) -> bytes:
    """HKDF with SHA-256 (RFC 5869)."""
    key = hmac.new(salt, secret, hashlib.sha256).digest()
    block = output = b""
    while len(output) < size:
        block = hmac.new(key, block + PROTOCOL + bytes([len(output) // 32 + 1]), hashlib.sha256).digest()
        output += block
    return output[:size]


class KeyAgreement:
    """One end's key for one run. The other end gets `public`."""

    def __init__(self) -> None:
        self._engine = engine()
        self._private, self.public = self._engine.new_key()

    def agree(self, theirs: bytes, seen: bytes, *, first: bool) -> tuple[Sealer, Unsealer]:
        """Agree on keys: what seals our messages, and what opens theirs.

        `seen` is what both ends have seen so far; exactly one end is `first`.
        """
        if len(theirs) != KEY or theirs == self.public:
            raise SealError("the other end sent an invalid key")
        secret = self._engine.shared(self._private, theirs)
        self._private = None
        if not any(secret):
            raise SealError("the other end sent an invalid key")
        both = (self.public, theirs) if first else (theirs, self.public)
        salt = hashlib.sha256(PROTOCOL + b"".join(both) + hashlib.sha256(seen).digest()).digest()
        keys = _hkdf(secret, salt, 2 * (KEY + NONCE))
        forth, back = keys[: KEY + NONCE], keys[KEY + NONCE :]
        ends = [(forth[:KEY], forth[KEY:], b">"), (back[:KEY], back[KEY:], b"<")]
        ours, others = ends if first else reversed(ends)
        return Sealer(self._engine, *ours), Unsealer(self._engine, *others)


class _Direction:
    """The cipher and the message numbers of one direction."""

    def __init__(self, engine: Any, key: bytes, start: bytes, direction: bytes) -> None:
        self._cipher = engine.cipher(key)
        self._start, self._direction = int.from_bytes(start, "big"), direction
        self._number = 0

    def _next(self) -> tuple[bytes, bytes]:
        """The nonce and the additional authenticated data of the next message."""
        number, self._number = self._number, self._number + 1
        if number >= MOST:
            raise SealError("too many messages for one key")
        return (self._start ^ number).to_bytes(NONCE, "big"), self._direction + number.to_bytes(8, "big")


class Sealer(_Direction):
    """Seals the messages of this end."""

    def seal(self, data: bytes) -> bytes:
        """Seal one message and put its length before it."""
        sealed: bytes = self._cipher.encrypt(*self._next(), data)
        return HEAD.pack(len(sealed)) + sealed

    def record(self, kind: bytes, *pieces: Any) -> Any:
        """Seal a record as one or more messages; each says whether more of it follows."""
        for piece in pieces[:-1]:
            for part in _parts(piece):
                yield self.seal(b"+" + kind + part)
        *before, last = _parts(pieces[-1])
        for part in before:
            yield self.seal(b"+" + kind + part)
        yield self.seal(b"." + kind + last)


def _parts(content: Any) -> list[Any]:
    view = memoryview(content)
    return [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)] or [view]


class Unsealer(_Direction):
    """Opens the messages of the other end: takes bytes in pieces of any size and returns records."""

    def __init__(self, engine: Any, key: bytes, start: bytes, direction: bytes) -> None:
        super().__init__(engine, key, start, direction)
        self._buffer = bytearray()
        self._kind = b""
        self._content = bytearray()

    def feed(self, data: bytes, most: int, error: int = 0) -> list[tuple[bytes, bytearray]]:
        """Take more bytes and return the records that are complete now, none larger than `most`.

        If `error` is given, a record of an exception may be no larger than that. After a SealError the
        channel must not be used.
        """
        self._buffer += data
        records = []
        while len(self._buffer) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._buffer)
            if not TAG + 2 <= size <= CHUNK + TAG + 2:
                raise SealError("a message has an impossible length")
            if len(self._buffer) < HEAD.size + size:
                break
            with memoryview(self._buffer) as view:
                message = bytes(view[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            record = self._add_message(self._cipher.decrypt(*self._next(), message), most, error)
            if record is not None:
                records.append(record)
        return records

    def _add_message(self, message: bytes, most: int, error: int) -> tuple[bytes, bytearray] | None:
        more, kind = message[:1], message[1:2]
        if more not in (b"+", b".") or (self._kind and kind != self._kind):
            raise SealError("a message belongs to no record")
        size = len(self._content) + len(message) - 2
        if error and kind == b"E" and size > error:
            raise SealError("an exception is larger than allowed")
        if size > most:
            raise OverflowError("a record is larger than allowed")
        self._content += memoryview(message)[2:]
        if more == b"+":
            self._kind = kind
            return None
        content, self._content, self._kind = self._content, bytearray(), b""
        return kind, content


_engines: list[Any] = []


def engine() -> Any:
    """The library that does the cryptography here: OpenSSL, or else `cryptography`."""
    if not _engines:
        library = _load()
        _engines.append(_OpenSSL(library) if library is not None else _cryptography())
    return _engines[0]


def _load() -> Any:
    """Load the OpenSSL that `hashlib` uses, or one by its name; None if there is none."""
    try:
        import ctypes
    except ImportError:
        return None
    names = list(LIBRARIES)
    try:
        import _hashlib

        names.insert(0, _hashlib.__file__)  # its symbols include those of the OpenSSL it is linked with
    except (ImportError, AttributeError):
        pass
    for name in names:
        try:
            library = ctypes.CDLL(name)
            for function, (result, arguments) in _types().items():
                symbol = getattr(library, function)
                symbol.restype, symbol.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


def _types() -> dict[str, Any]:
    from ctypes import c_char_p, c_int, c_size_t, c_void_p

    pointer, number, text = c_void_p, c_int, c_char_p
    crypt = {
        f"EVP_{what}{step}": (number, arguments)
        for what in ("Encrypt", "Decrypt")
        for step, arguments in (
            ("Init_ex", (pointer, pointer, pointer, text, text)),
            ("Update", (pointer, pointer, pointer, text, number)),
            ("Final_ex", (pointer, pointer, pointer)),
        )
    }
    return {
        "EVP_PKEY_new_raw_private_key": (pointer, (number, pointer, text, c_size_t)),
        "EVP_PKEY_new_raw_public_key": (pointer, (number, pointer, text, c_size_t)),
        "EVP_PKEY_get_raw_public_key": (number, (pointer, pointer, pointer)),
        "EVP_PKEY_free": (None, (pointer,)),
        "EVP_PKEY_CTX_new": (pointer, (pointer, pointer)),
        "EVP_PKEY_CTX_free": (None, (pointer,)),
        "EVP_PKEY_derive_init": (number, (pointer,)),
        "EVP_PKEY_derive_set_peer": (number, (pointer, pointer)),
        "EVP_PKEY_derive": (number, (pointer, pointer, pointer)),
        "EVP_aes_256_gcm": (pointer, ()),
        "EVP_CIPHER_CTX_new": (pointer, ()),
        "EVP_CIPHER_CTX_free": (None, (pointer,)),
        "EVP_CIPHER_CTX_ctrl": (number, (pointer, number, number, pointer)),
        **crypt,
    }


class _OpenSSL:
    """OpenSSL through ctypes."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def new_key(self) -> tuple[bytes, bytes]:
        import ctypes

        private = os.urandom(KEY)
        key = self.library.EVP_PKEY_new_raw_private_key(X25519, None, private, KEY)
        public, size = ctypes.create_string_buffer(KEY), ctypes.c_size_t(KEY)
        ok = bool(key) and self.library.EVP_PKEY_get_raw_public_key(key, public, ctypes.byref(size)) == 1
        self.library.EVP_PKEY_free(key)
        if not ok:
            raise SealError("OpenSSL has no X25519")
        return private, public.raw

    def shared(self, private: bytes, theirs: bytes) -> bytes:
        import ctypes

        library = self.library
        ours = library.EVP_PKEY_new_raw_private_key(X25519, None, private, KEY)
        other = library.EVP_PKEY_new_raw_public_key(X25519, None, theirs, KEY)
        context = library.EVP_PKEY_CTX_new(ours, None)
        secret, size = ctypes.create_string_buffer(KEY), ctypes.c_size_t(KEY)
        try:
            if (
                not (ours and other and context)
                or library.EVP_PKEY_derive_init(context) != 1
                or library.EVP_PKEY_derive_set_peer(context, other) != 1
                or library.EVP_PKEY_derive(context, secret, ctypes.byref(size)) != 1
            ):
                raise SealError("the other end sent an invalid key")
            return secret.raw
        finally:
            ctypes.memset(secret, 0, KEY)
            library.EVP_PKEY_CTX_free(context)
            library.EVP_PKEY_free(ours)
            library.EVP_PKEY_free(other)

    def cipher(self, key: bytes) -> _OpenSSLCipher:
        return _OpenSSLCipher(self.library, key)


class _OpenSSLCipher:
    """AES-256-GCM with one key."""

    def __init__(self, library: Any, key: bytes) -> None:
        import ctypes

        self._library, self._key = library, key
        self._out = ctypes.create_string_buffer(CHUNK + 2)
        self._context = library.EVP_CIPHER_CTX_new()
        if not self._context:
            raise SealError("OpenSSL is out of memory")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.EVP_CIPHER_CTX_free(self._context)  # this wipes the key
            self._context = None

    def encrypt(self, nonce: bytes, beside: bytes, data: bytes) -> bytes:
        import ctypes

        out = self._process("Encrypt", nonce, beside, data)
        size, tag = ctypes.c_int(0), ctypes.create_string_buffer(TAG)
        if (
            self._library.EVP_EncryptFinal_ex(self._context, tag, ctypes.byref(size)) != 1
            or self._library.EVP_CIPHER_CTX_ctrl(self._context, GET_TAG, TAG, tag) != 1
        ):
            raise SealError("OpenSSL could not seal a message")
        return out + tag.raw

    def decrypt(self, nonce: bytes, beside: bytes, data: bytes) -> bytes:
        import ctypes

        out = self._process("Decrypt", nonce, beside, data[:-TAG])
        size, tag = ctypes.c_int(0), ctypes.create_string_buffer(data[-TAG:], TAG)
        rest = ctypes.create_string_buffer(TAG)
        if (
            self._library.EVP_CIPHER_CTX_ctrl(self._context, SET_TAG, TAG, tag) != 1
            or self._library.EVP_DecryptFinal_ex(self._context, rest, ctypes.byref(size)) != 1
        ):
            raise SealError("a message is not what the other end sealed")
        return out

    def _process(self, what: str, nonce: bytes, beside: bytes, data: bytes) -> bytes:
        import ctypes

        library, context = self._library, self._context
        init, update = (getattr(library, f"EVP_{what}{step}") for step in ("Init_ex", "Update"))
        size, out = ctypes.c_int(0), self._out
        if (
            len(data) > len(out)
            or init(context, library.EVP_aes_256_gcm(), None, self._key, nonce) != 1
            or update(context, None, ctypes.byref(size), beside, len(beside)) != 1
            or update(context, out, ctypes.byref(size), data, len(data)) != 1
            or size.value != len(data)
        ):
            raise SealError("OpenSSL could not process a message")
        return ctypes.string_at(out, len(data))


def _cryptography() -> Any:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise SealError(
            "this Python finds neither OpenSSL (libcrypto.so.3) nor the package `cryptography`"
        ) from None

    class Cipher:
        def __init__(self, key: bytes) -> None:
            self._gcm = AESGCM(key)

        def encrypt(self, nonce: bytes, beside: bytes, data: bytes) -> bytes:
            return self._gcm.encrypt(nonce, data, beside)

        def decrypt(self, nonce: bytes, beside: bytes, data: bytes) -> bytes:
            try:
                return self._gcm.decrypt(nonce, data, beside)
            except InvalidTag:
                raise SealError("a message is not what the other end sealed") from None

    class Engine:
        @staticmethod
        def new_key() -> tuple[Any, bytes]:
            private = X25519PrivateKey.generate()
            return private, private.public_key().public_bytes_raw()

        @staticmethod
        def shared(private: Any, theirs: bytes) -> bytes:
            try:
                return bytes(private.exchange(X25519PublicKey.from_public_bytes(theirs)))
            except ValueError:
                raise SealError("the other end sent an invalid key") from None

        cipher = Cipher

    return Engine()
