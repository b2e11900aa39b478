"""Where this system keeps the certificates of the authorities that its programs trust."""

from __future__ import annotations

import os

#: One file with all of them, as distributions of Linux name it.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def system_bundle() -> str:
    """Return the path of the bundle; empty if this system has none."""
    return next((path for path in BUNDLES if os.path.isfile(path)), "")
