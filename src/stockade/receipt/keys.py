"""The signing keys: one Ed25519 key for each state directory, and those it had before.

    keys/signing.pem    the private key, PKCS #8, 0600; encrypted on request
    keys/KEYID.pem      every public key that has ever signed here

The first receipt makes the key. Rotation replaces the private key by a new one and destroys the old one; the
old public key stays, so that its receipts can be verified. The last thing the old key signs is the new public
key.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

import msgspec

from stockade.errors import NotFoundError, ReceiptError
from stockade.receipt import ed25519
from stockade.receipt.ed25519 import Signer
from stockade.resolve.receipt_settings import Settings

SIGNING = "signing.pem"
LARGEST = 1 << 16


class Key(msgspec.Struct, frozen=True):
    """A public key of this state directory."""

    id: str
    public: bytes
    path: str
    #: Whether it signs new receipts, and when it was made.
    current: bool
    made: float


#: Loaded keys by path, with the identity of their file: another process may rotate a key.
_signers: dict[str, tuple[tuple[int, int, int], Signer]] = {}


def signer(home: str, settings: Settings) -> Signer:
    """Return the key that signs for a state directory; make it if there is none."""
    path = f"{home}/keys/{SIGNING}"
    try:
        now = _identity(path)
    except FileNotFoundError:
        _make_first(home)
        now = _identity(path)
    known = _signers.get(path)
    if known is None or known[0] != now:
        seed = ed25519.read_private(_read_private(path), lambda: passphrase(settings), path)
        known = _signers[path] = (now, Signer(seed))
        _publish(home, known[1])
        if _current(home) != known[1].id:
            _note_current(home, known[1].id)
    return known[1]


def cosigner(settings: Settings) -> Signer | None:
    """Return the second key that the user's settings name, if any."""
    return None if not settings.cosign else private(settings.cosign, settings)


def private(path: str, settings: Settings) -> Signer:
    """Return the private key in a file that the user names."""
    try:
        now = _identity(path)
        known = _signers.get(path)
        if known is None or known[0] != now:
            seed = ed25519.read_private(_read_private(path), lambda: passphrase(settings), path)
            known = _signers[path] = (now, Signer(seed))
    except OSError as error:
        raise _unusable(path, error) from None
    return known[1]


def known(home: str) -> list[Key]:
    """Return every public key of a state directory, the current one first, then the newest."""
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
        public = ed25519.read_public(_read(path), path)
        id = ed25519.key_id(public)
        if name != f"{id}.pem":
            raise ReceiptError(
                f"{path} holds a key with another id: {id}",
                failure="unknown-key",
                hint="find out who put it there",
            )
        found.append(Key(id, public, path, id == current, os.stat(path).st_mtime))
    return sorted(found, key=lambda key: (key.current, key.made), reverse=True)


def find(home: str, id: str) -> Key:
    """Return the key that an id, or the beginning of one, names; the current one without an id."""
    from stockade.state.ids import SHORTENED, matching

    keys = {key.id: key for key in known(home)}
    found = (
        [keys[name] for name in matching(id, keys)] if id else [key for key in keys.values() if key.current]
    )
    if len(found) != 1:
        what = f"{id!r}" if id else "current key"
        raise NotFoundError(
            f"{'several keys begin with' if found else 'there is no'} {what}",
            hint=f"`stockade keys show` lists them; {SHORTENED}",
        )
    return found[0]


def public_key(id: str = "") -> str:
    """Return a public key of this user's receipts as PEM, as `stockade keys export` prints it.

    Without an `id`, or the beginning of one, it is the key that signs now. A verifier needs nothing else:

    >>> import stockade
    >>> result = stockade.run(["true"])
    >>> stockade.verify(result.receipt, stockade.receipt.public_key()) == result.receipt
    True
    """
    from stockade.linux.user import Caller
    from stockade.state import state_dir

    caller = Caller.current()
    return ed25519.public_pem(find(state_dir(caller.environ, caller.home), id).public).decode()


def replacement(home: str, passphrase: bytes | None = None) -> tuple[Signer, Callable[[], None]]:
    """Make a new key; return it and a function that installs it. The caller holds the lock of the chain."""
    seed = ed25519.new_seed()
    fresh = Signer(seed)
    os.makedirs(f"{home}/keys", 0o700, exist_ok=True)
    _publish(home, fresh)

    def install() -> None:
        part = _write_temporary(home, ed25519.private_pem(seed, passphrase))
        os.rename(part, f"{home}/keys/{SIGNING}")
        _note_current(home, fresh.id)

    return fresh, install


def passphrase(settings: Settings) -> bytes:
    """Return the passphrase of an encrypted key, from the file that the settings name."""
    if not settings.passphrase_file:
        raise ReceiptError(
            "the key that signs receipts is encrypted, and your settings do not say where its passphrase is",
            failure="not-made",
            hint='write in your config.toml, under [receipts]: passphrase_file = "PATH"',
        )
    return secret(settings.passphrase_file).rstrip(b"\r\n")


def secret(path: str) -> bytes:
    """Return the contents of a private file of the user."""
    try:
        return _read_private(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _make_first(home: str) -> None:
    """Make the first key; if several processes do so, the first link wins."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{home}/keys", 0o700)
    seed = ed25519.new_seed()
    part = _write_temporary(home, ed25519.private_pem(seed))
    try:
        os.link(part, f"{home}/keys/{SIGNING}")
    except FileExistsError:
        return
    finally:
        os.unlink(part)


def _write_temporary(home: str, pem: bytes) -> str:
    """Write a private file under a temporary name, and return its path."""
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
    """Keep the public key before it signs anything, so that its signatures can always be verified."""
    path = f"{home}/keys/{signer.id}.pem"
    if not os.path.lexists(path):
        part = _write_temporary(home, ed25519.public_pem(signer.public))
        os.rename(part, path)


def _note_current(home: str, id: str) -> None:
    """Write down which key signs: the file of an encrypted key does not say."""
    part = _write_temporary(home, id.encode())
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
    """Read a file, and refuse it unless only its owner, the user or root, can read it."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid not in (0, os.geteuid()):
            raise ReceiptError(
                f"{path} is not a private file of yours (mode {stat.S_IMODE(info.st_mode):04o})",
                failure="not-made",
                hint=f"find out who could read it, rotate the key, and run: chmod 600 {path}",
            )
        return os.read(file, LARGEST)
    finally:
        os.close(file)


def _unusable(path: str, error: OSError) -> ReceiptError:
    return ReceiptError(f"{path} cannot be used: {error.strerror}", failure="not-made")
