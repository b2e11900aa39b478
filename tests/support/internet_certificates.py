"""A certificate authority of the tests' own: it certifies any name that a client asks for."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

YEAR = datetime.timedelta(days=365)


class Authority:
    """Its files lie in a directory: `ca.pem`, and a certificate with its key by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Small internet")])
        self._contexts: dict[tuple[str, bool], ssl.SSLContext] = {}
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - YEAR)
            .not_valid_after(now + YEAR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = directory / "ca.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *addresses: str) -> tuple[Path, Path]:
        """Make a certificate for a name and addresses; return its file and that of its key."""
        now = datetime.datetime.now(datetime.UTC)
        names: list[x509.GeneralName] = [
            x509.DNSName(name),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        ]
        public = self._leaf_key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - YEAR)
            .not_valid_after(now + YEAR)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        file, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key.touch(mode=0o600)
        key.write_bytes(
            self._leaf_key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return file, key

    def context(self, name: str, *addresses: str) -> ssl.SSLContext:
        """A server's context that answers with a certificate for whatever name the client says.

        HTTP/2 is offered under names that begin with `h2.`.
        """
        context = self._made(name, addresses)

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, asked: str | None, _: ssl.SSLContext) -> None:
            if asked:
                connection.context = self._made(asked.lower(), ())
            # What the servers write down about the connection.
            connection.asked_name = asked or ""  # type: ignore[union-attr]

        context.sni_callback = choose
        return context

    def _made(self, name: str, addresses: tuple[str, ...]) -> ssl.SSLContext:
        key = (name, bool(addresses))
        if key not in self._contexts:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.issue(name, *addresses))
            context.set_alpn_protocols(["h2", "http/1.1"] if name.startswith("h2.") else ["http/1.1"])
            self._contexts[key] = context
        return self._contexts[key]


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )
