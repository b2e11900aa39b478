"""The certificate authority of one sandbox: it vouches for the hosts whose requests are judged.

The egress process makes it before it reads anything of a program, and its key never leaves the process. The
supervisor gets the certificate alone and shows it inside.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: How many certificates are kept; more are made again.
CERTIFICATES = 64
_SPARE = datetime.timedelta(days=1)
#: Clients accept certificates of servers for 398 days at most.
_LEAF_LIFE = datetime.timedelta(days=90)
_LIFE = datetime.timedelta(days=3650)
_CURVE = ec.SECP256R1()
_MOST_COMMON_NAME = 64


class HostCertificate(NamedTuple):
    """A certificate for one host, until when a new connection may use it, and its key."""

    certificate: x509.Certificate
    fresh_until: datetime.datetime
    key: ec.EllipticCurvePrivateKey


class CertificateAuthority:
    """Makes certificates for hosts; all of them have one key."""

    def __init__(self) -> None:
        self._key, self._leaf_key = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Stockade, for one sandbox")])
        self._made: dict[str, HostCertificate] = {}
        now = datetime.datetime.now(datetime.UTC)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key(), now, _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        """The authority's own certificate, which is public."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def certificate_for(self, host: str) -> HostCertificate:
        """Return a certificate for a host, from the last ones or a new one."""
        now = datetime.datetime.now(datetime.UTC)
        found = self._made.pop(host, None)
        if found is None or found.fresh_until < now:
            found = HostCertificate(self._make(host, now), now + _LEAF_LIFE / 2, self._leaf_key)
            if len(self._made) >= CERTIFICATES:
                del self._made[next(iter(self._made))]
        self._made[host] = found
        return found

    def _make(self, host: str, now: datetime.datetime) -> x509.Certificate:
        common = host if len(host) <= _MOST_COMMON_NAME else "a host"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        public = self._leaf_key.public_key()
        return (
            _builder(subject, self._name, public, now, _LEAF_LIFE)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SPARE)
        .not_valid_after(now + life)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
