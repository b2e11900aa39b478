"""Ed25519 signatures, and the files that keys are in.

Signing happens at the end of every run, so it must not cost a slow import. It uses the OpenSSL of the
interpreter's own `hashlib` through ctypes, and `cryptography` only if that is not found. Both give the same
signature. Everything else (verifying, encrypted keys) uses `cryptography`.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from stockade.errors import ReceiptError
from stockade.linux.sha256 import sha256

#: The bytes before the 32 bytes of a key in PKCS #8 and in SubjectPublicKeyInfo.
PRIVATE = bytes.fromhex("302e020100300506032b657004220420")
PUBLIC = bytes.fromhex("302a300506032b6570032100")
KEY_BYTES, SIGNATURE_BYTES = 32, 64
#: The shared objects of OpenSSL 3 and 1.1, and its number for Ed25519.
LIBRARIES = ("libcrypto.so.3", "libcrypto.so.1.1")
ED25519 = 1087


class Signer:
    """A private key, ready to sign. `id` is the SHA-256 of its public key in DER."""

    def __init__(self, seed: bytes) -> None:
        self.sign, self.public = _by_openssl(seed) or _by_cryptography(seed)
        self.id = key_id(self.public)


def new_seed() -> bytes:
    """Return a new private key."""
    return os.urandom(KEY_BYTES)


@lru_cache(maxsize=64)
def key_id(public: bytes) -> str:
    """Return the id by which receipts name a public key."""
    return sha256(PUBLIC + public).hexdigest()


def _by_openssl(seed: bytes) -> tuple[Callable[[bytes], bytes], bytes] | None:
    """Return a function that signs, and the public key; None if OpenSSL is not found."""
    library = _library()
    if library is None:
        return None
    import ctypes

    key = library.EVP_PKEY_new_raw_private_key(ED25519, None, seed, KEY_BYTES)
    public = ctypes.create_string_buffer(KEY_BYTES)
    size = ctypes.c_size_t(KEY_BYTES)
    if not key or library.EVP_PKEY_get_raw_public_key(key, public, ctypes.byref(size)) != 1:
        return None

    def begin(context: int) -> bool:
        return bool(library.EVP_DigestSignInit(context, None, None, None, key) == 1)

    first = library.EVP_MD_CTX_new()
    if not begin(first):
        return None
    room = ctypes.c_char * SIGNATURE_BYTES

    def sign(data: bytes) -> bytes:
        context = library.EVP_MD_CTX_new()
        try:
            signature, size = room(), ctypes.c_size_t(SIGNATURE_BYTES)
            # A new context would look up the algorithm again. OpenSSL 1.1 cannot copy this kind of context.
            begun = library.EVP_MD_CTX_copy_ex(context, first) == 1 or begin(context)
            if (
                not begun
                or library.EVP_DigestSign(context, signature, ctypes.byref(size), data, len(data)) != 1
            ):
                raise ReceiptError("OpenSSL could not sign", failure="not-made")
            return signature.raw
        finally:
            library.EVP_MD_CTX_free(context)

    return sign, public.raw


_loaded: list[Any] = []


def _library() -> Any:
    """Return OpenSSL, loaded once; None if it is not found."""
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


def _load() -> Any:
    import ctypes
    from ctypes import c_char_p, c_int, c_size_t, c_void_p

    types = {
        "EVP_PKEY_new_raw_private_key": (c_void_p, (c_int, c_void_p, c_char_p, c_size_t)),
        "EVP_PKEY_get_raw_public_key": (c_int, (c_void_p, c_char_p, c_void_p)),
        "EVP_MD_CTX_new": (c_void_p, ()),
        "EVP_MD_CTX_free": (None, (c_void_p,)),
        "EVP_MD_CTX_copy_ex": (c_int, (c_void_p, c_void_p)),
        "EVP_DigestSignInit": (c_int, (c_void_p,) * 5),
        "EVP_DigestSign": (c_int, (c_void_p, c_char_p, c_void_p, c_char_p, c_size_t)),
    }
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            for function, (result, arguments) in types.items():
                found = getattr(library, function)
                found.restype, found.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


def _by_cryptography(seed: bytes) -> tuple[Callable[[bytes], bytes], bytes]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    return key.sign, key.public_key().public_bytes_raw()


def verifies(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the key made this signature of the data."""
    verify, invalid = _verifier(public)
    try:
        verify(signature, data)
    except invalid:
        return False
    return True


@lru_cache(maxsize=64)
def _verifier(raw: bytes) -> tuple[Callable[[bytes, bytes], None], type[Exception]]:
    """Return a function that verifies a key's signatures, and the error that it raises. Slow to load."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(raw).verify, InvalidSignature


def private_pem(seed: bytes, passphrase: bytes | None = None) -> bytes:
    """Return a private key as PEM, encrypted if a passphrase is given."""
    if passphrase is None:
        return _pem("PRIVATE KEY", PRIVATE + seed)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )


def public_pem(public: bytes) -> bytes:
    """Return a public key as PEM."""
    return _pem("PUBLIC KEY", PUBLIC + public)


def read_private(pem: bytes, passphrase: Callable[[], bytes], name: str) -> bytes:
    """Return the private key in a PEM; `passphrase` is called only if it is encrypted."""
    seed = _unpack(pem, "PRIVATE KEY", PRIVATE)
    if seed is not None:
        return seed
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    encrypted = b"ENCRYPTED" in pem
    try:
        key = serialization.load_pem_private_key(pem, passphrase() if encrypted else None)
    except (ValueError, TypeError) as error:
        raise ReceiptError(
            f"{name} cannot be read: {'the passphrase is wrong, or ' if encrypted else ''}it is damaged",
            failure="not-made",
            hint="`stockade keys rotate` makes a new one; old receipts stay verifiable",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ReceiptError(
            f"{name} is not an Ed25519 key", failure="not-made", hint="Stockade signs only with Ed25519"
        )
    return key.private_bytes_raw()


def read_public(pem: bytes, name: str) -> bytes:
    """Return the public key in a PEM."""
    public = _unpack(pem, "PUBLIC KEY", PUBLIC)
    if public is None:
        raise ReceiptError(
            f"{name} is not an Ed25519 public key in PEM",
            failure="unknown-key",
            hint="`stockade keys export` prints yours",
        )
    return public


def _pem(label: str, der: bytes) -> bytes:
    text = binascii.b2a_base64(der, newline=False).decode()
    return f"-----BEGIN {label}-----\n{text}\n-----END {label}-----\n".encode()


def _unpack(pem: bytes, label: str, prefix: bytes) -> bytes | None:
    """Return the 32 bytes of a key in a PEM with that label; None if it has another form."""
    lines = pem.strip().splitlines()
    if len(lines) < 3 or (lines[0], lines[-1]) != tuple(
        f"-----{word} {label}-----".encode() for word in ("BEGIN", "END")
    ):
        return None
    try:
        der = binascii.a2b_base64(b"".join(lines[1:-1]), strict_mode=True)
    except binascii.Error:
        return None
    return der[len(prefix) :] if der.startswith(prefix) and len(der) == len(prefix) + KEY_BYTES else None
