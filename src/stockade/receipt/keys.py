"""Who signs: one Ed25519 key for each state directory, and those it had before.

    keys/signing.pem    the private key, PKCS #8, 0600; encrypted on request
    keys/KEYID.pem      every public key that has ever signed here

The first receipt makes the key. Rotation puts a new private key in the place
of the old one, which is gone then; its public key stays, so that what it
signed can be verified. Its last signature is over the new public key.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

import msgspec

from stockade.errors import NotFoundError, ReceiptError
from stockade.receipt import crypto
from stockade.receipt.crypto import Signer
from stockade.receipt.settings import Settings

SIGNING = "signing.pem"
LARGEST = 1 << 16


class Key(msgspec.Struct, frozen=True):
    """A public key of this state directory."""

    id: str
    public: bytes
    path: str
    #: Whether it signs what is made now, and since when it is known.
    current: bool
    made: float


#: The key in use, by its file: another process may rotate it.
_signers: dict[str, tuple[tuple[int, int, int], Signer]] = {}


def signer(home: str, settings: Settings) -> Signer:
    """The key that signs for a state directory, made where there is none."""
    path = f"{home}/keys/{SIGNING}"
    try:
        now = _identity(path)
    except FileNotFoundError:
        _make(home)
        now = _identity(path)
    known = _signers.get(path)
    if known is None or known[0] != now:
        seed = crypto.read_private(_read_private(path), lambda: passphrase(settings), path)
        known = _signers[path] = (now, Signer(seed))
        _publish(home, known[1])
        if _current(home) != known[1].id:
            _note(home, known[1].id)
    return known[1]


def cosigner(settings: Settings) -> Signer | None:
    """The second key that the user has named, if any."""
    return None if not settings.cosign else private(settings.cosign, settings)


def private(path: str, settings: Settings) -> Signer:
    """A private key in a file of the caller's."""
    try:
        now = _identity(path)
        known = _signers.get(path)
        if known is None or known[0] != now:
            seed = crypto.read_private(_read_private(path), lambda: passphrase(settings), path)
            known = _signers[path] = (now, Signer(seed))
    except OSError as error:
        raise _unusable(path, error) from None
    return known[1]


def known(home: str) -> list[Key]:
    """Every public key that has signed here, the newest first."""
    found = []
    try:
        names = os.listdir(f"{home}/keys")
    except FileNotFoundError:
        return []
    current = _current(home)
    for name in names:
        path = f"{home}/keys/{name}"
        if name == SIGNING or not name.endswith(".pem"):
            continue
        public = crypto.read_public(_read(path), path)
        id = crypto.key_id(public)
        if name != f"{id}.pem":
            raise ReceiptError(
                f"{path} holds another key", failure="unknown-key", hint="look who put it there"
            )
        found.append(Key(id, public, path, id == current, os.stat(path).st_mtime))
    return sorted(found, key=lambda key: (key.current, key.made), reverse=True)


def find(home: str, id: str) -> Key:
    """The key that an id, or the beginning of one, names; the current one without an id."""
    found = [key for key in known(home) if (key.id.startswith(id) if id else key.current)]
    if len(found) != 1:
        what = f"{id!r}" if id else "current key"
        raise NotFoundError(
            f"{'several keys begin with' if found else 'there is no'} {what}", hint="`stockade keys show`"
        )
    return found[0]


def replacement(home: str, passphrase: bytes | None = None) -> tuple[Signer, Callable[[], None]]:
    """A new key, and what puts it in the place of the current one. The caller holds the chain."""
    seed = crypto.new_seed()
    fresh = Signer(seed)
    os.makedirs(f"{home}/keys", 0o700, exist_ok=True)
    _publish(home, fresh)

    def put() -> None:
        part = _written(home, crypto.private_pem(seed, passphrase))
        os.rename(part, f"{home}/keys/{SIGNING}")
        _note(home, fresh.id)

    return fresh, put


def passphrase(settings: Settings) -> bytes:
    """The passphrase of an encrypted key, from the file that the settings name."""
    if not settings.passphrase_file:
        raise ReceiptError(
            "the key that signs receipts is encrypted, and nobody has said where its passphrase is",
            failure="not-made",
            hint='in your config.toml: [receipts], passphrase_file = "PATH"',
        )
    return secret(settings.passphrase_file).rstrip(b"\r\n")


def secret(path: str) -> bytes:
    """What is in a private file of the caller's."""
    try:
        return _read_private(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _make(home: str) -> None:
    """Make the first key. Whoever links it first has made it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{home}/keys", 0o700)
    seed = crypto.new_seed()
    part = _written(home, crypto.private_pem(seed))
    try:
        os.link(part, f"{home}/keys/{SIGNING}")
    except FileExistsError:
        return
    finally:
        os.unlink(part)


def _written(home: str, pem: bytes) -> str:
    part = f"{home}/keys/.{os.urandom(6).hex()}"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, pem)
        os.fsync(file)
    except BaseException:
        os.unlink(part)
        raise
    finally:
        os.close(file)
    return part


def _publish(home: str, signer: Signer) -> None:
    """Keep the public key: before it signs anything, so that what it signs can always be verified."""
    path = f"{home}/keys/{signer.id}.pem"
    if not os.path.lexists(path):
        part = _written(home, crypto.public_pem(signer.public))
        os.rename(part, path)


def _note(home: str, id: str) -> None:
    """Write down which key signs: an encrypted one does not say."""
    part = _written(home, id.encode())
    os.rename(part, f"{home}/keys/current")


def _current(home: str) -> str:
    try:
        return _read(f"{home}/keys/current").decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""


def _identity(path: str) -> tuple[int, int, int]:
    info = os.stat(path)
    return info.st_ino, info.st_dev, info.st_mtime_ns


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return os.read(file, LARGEST)
    finally:
        os.close(file)


def _read_private(path: str) -> bytes:
    """A file that only its owner, the caller or root, can read."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid not in (0, os.geteuid()):
            raise ReceiptError(
                f"{path} is not a private file of yours (mode {stat.S_IMODE(info.st_mode):04o})",
                failure="not-made",
                hint=f"look who could read it, rotate the key, and: chmod 600 {path}",
            )
        return os.read(file, LARGEST)
    finally:
        os.close(file)


def _unusable(path: str, error: OSError) -> ReceiptError:
    return ReceiptError(f"{path} cannot be used: {error.strerror}", failure="not-made")
