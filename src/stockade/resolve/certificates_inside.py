"""Where programs find the certificate of their sandbox's own authority: files, and variables that name them.

A sandbox with rules for HTTP requests has such an authority. Its certificate is shown together with the roots
that servers are verified by: at the paths of the system's own bundle, and in a directory that variables name.
Variables are for programs that bring roots of their own.
"""

from __future__ import annotations

import os

from stockade.linux.mount_table import mounted_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.policy import Policy

DIRECTORY = "/run/stockade/certificates"
#: Where placeholders of secrets are shown as files, and their directory among the certificates.
SECRETS, SECRETS_NAME = "/run/secrets", "secrets"
#: All roots and the authority; the authority alone; all of them as Java wants them.
BUNDLE, AUTHORITY, TRUST_STORE = "bundle.pem", "authority.pem", "truststore.jks"
FILES = (BUNDLE, AUTHORITY, TRUST_STORE)

#: Variables that name a file which takes the place of a program's own roots.
_REPLACING = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "NPM_CONFIG_CAFILE",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
)
#: Variables that name a file which is added to a program's own roots.
_ADDING = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")


def judges_requests(policy: Policy) -> bool:
    """Whether the policy has rules for HTTP requests, so that programs get certificates of Stockade's own."""
    return policy.net != "open" and any(" " in rule for rule in policy.net)


def variables() -> dict[str, str]:
    """Return the variables that make programs trust the authority."""
    java = f"-Djavax.net.ssl.trustStore={DIRECTORY}/{TRUST_STORE} -Djavax.net.ssl.trustStoreType=JKS"
    return {
        **dict.fromkeys(_REPLACING, f"{DIRECTORY}/{BUNDLE}"),
        **dict.fromkeys(_ADDING, f"{DIRECTORY}/{AUTHORITY}"),
        "JAVA_TOOL_OPTIONS": java,
    }


def shown_at(root: str = "") -> list[str]:
    """Return where the bundle takes the place of the system's, whose files lie below `root`.

    Where the host has mounted a file itself, it stays: evidence refuses one mount that covers another.
    """
    from stockade.linux.root_certificates import BUNDLES

    found, mounted = set(), mounted_below(f"{root}/etc")
    for path in BUNDLES:
        real = os.path.realpath(f"{root}{path}")
        if os.path.isfile(real) and real.startswith(f"{root}/") and real not in mounted:
            found.add(real[len(root) :])
    return sorted(found)
