"""The certificates that a sandbox with rules for requests shows its programs.

The files exist, empty, before the walls come up, because they are mounts. They are written once the egress
process has made its authority, and before the first program starts. Only the certificate is ever here: the
key stays in the egress process.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import struct
import time
from collections.abc import Mapping
from hashlib import sha1

from stockade.errors import SetupError
from stockade.resolve.certificates_inside import AUTHORITY, BUNDLE, FILES, SECRETS_NAME, TRUST_STORE
from stockade.runs.scratch import ScratchDirectory

#: The most bytes of roots, as `resolve.host_network` has it.
MOST_ROOTS = 4 << 20
MOST_AUTHORITY = 4096
_CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----([A-Za-z0-9+/=\s]+?)-----END ")
# A key store of Java: magic number and version; a trusted certificate; what its digest begins with.
_JKS = struct.pack(">II", 0xFEEDFEED, 2)
_TRUSTED = 2
_PASSWORD = "changeit".encode("utf-16-be") + b"Mighty Aphrodite"


class TrustFiles(ScratchDirectory):
    """The directory with these files, for one sandbox."""

    def __init__(self, home: str, id: str) -> None:
        super().__init__(home, id, {})
        os.chmod(self.path, 0o755)
        for name in FILES:
            with open(f"{self.path}/{name}", "xb") as file:
                os.fchmod(file.fileno(), 0o644)

    def fill(self, authority: object, roots: bytes) -> None:
        """Write the certificate of the authority, by the word of the egress process, and the roots."""
        own = check_authority(authority)
        ends = b"" if roots.endswith(b"\n") or not roots else b"\n"
        self._write(AUTHORITY, own)
        self._write(BUNDLE, roots + ends + own)
        self._write(TRUST_STORE, trust_store(roots + ends + own))

    def show_placeholders(self, placeholders: Mapping[str, str]) -> None:
        """Write the placeholders of secrets that programs find in files."""
        os.mkdir(f"{self.path}/{SECRETS_NAME}", 0o755)
        os.chmod(f"{self.path}/{SECRETS_NAME}", 0o755)
        for name, text in placeholders.items():
            with open(f"{self.path}/{SECRETS_NAME}/{name}", "x") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)

    def _write(self, name: str, content: bytes) -> None:
        descriptor = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(content)


def check_authority(text: object) -> bytes:
    """Return the certificate of an authority as PEM; the egress process is not trusted to have sent one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        if not isinstance(text, str) or len(text) > MOST_AUTHORITY:
            raise ValueError("it is too long")
        found = x509.load_pem_x509_certificate(text.encode("ascii"))
        key = found.public_key()
        about = found.extensions.get_extension_for_class(x509.BasicConstraints).value
        if not (about.ca and about.path_length == 0):
            raise ValueError("it is not one of an authority for hosts")
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
            raise ValueError("its key is of another kind")
        found.verify_directly_issued_by(found)
    except Exception as error:
        raise SetupError(
            f"the egress process has sent no usable certificate of its authority: {error}",
            stage="egress",
            hint="this is a bug in Stockade; please report it with `stockade doctor --json`",
        ) from None
    return found.public_bytes(serialization.Encoding.PEM)


def read_roots(path: str) -> bytes:
    """Return the certificates by which servers are verified; b"" without a path."""
    if not path:
        return b""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = file.read(MOST_ROOTS + 1) or b""
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from None
    if len(content) > MOST_ROOTS:
        raise _unusable(path, f"is larger than {MOST_ROOTS >> 20} MiB")
    if b"PRIVATE KEY" in content.upper():
        raise _unusable(path, "has a private key in it")
    if not _CERTIFICATE.search(content):
        raise _unusable(path, "has no certificate in it")
    return content


def _unusable(path: str, why: str) -> SetupError:
    return SetupError(
        f"{path}, by which servers are to be verified, {why}",
        stage="egress",
        hint="name a file of certificates with net_roots or SSL_CERT_FILE",
    )


def trust_store(bundle: bytes) -> bytes:
    """Return certificates as Java reads them."""
    entries = []
    now = struct.pack(">Q", int(time.time() * 1000))
    for number, found in enumerate(_CERTIFICATE.finditer(bundle)):
        try:
            content = base64.b64decode(found[1])
        except binascii.Error:
            continue
        alias, kind = _text(f"root-{number}"), _text("X.509")
        entries.append(
            struct.pack(">I", _TRUSTED) + alias + now + kind + struct.pack(">I", len(content)) + content
        )
    body = _JKS + struct.pack(">I", len(entries)) + b"".join(entries)
    return body + sha1(_PASSWORD + body, usedforsecurity=False).digest()


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")
