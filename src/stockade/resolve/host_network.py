"""What programs with a network need: the certificates and proxies that the user's environment names.

For `net = "open"` and for rules that allow something. A file of certificates is shown read-only. Its content
is looked at through the descriptor that is shown: a file with a private key, or without a certificate, is
never shown, whatever a variable says. A proxy is passed without its user and password, and only with
`net = "open"`: with rules, Stockade itself connects through it, and for a program it would be a host that no
rule names. With `proxy = true` the variables name the proxy that Stockade puts inside. What the policy says
about a variable (`env`, `pass_env`) or a path (`deny`) comes first.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping

import msgspec

from stockade.errors import PolicyError
from stockade.linux.mount_table import mounted_below
from stockade.policy.model import Policy
from stockade.policy.net_rules import PROXY_ADDRESSES, PROXY_PORT
from stockade.policy.values import show
from stockade.resolve.certificates_inside import judges_requests
from stockade.resolve.certificates_inside import variables as inside_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.resolve.paths.hidden_paths import HiddenPaths
    from stockade.resolve.resolved import Grant

#: Variables that name a file of certificates.
FILES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "NPM_CONFIG_CAFILE",
    "npm_config_cafile",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "DENO_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
)
#: Variables that name a directory of certificates.
DIRECTORIES = ("SSL_CERT_DIR", "GIT_SSL_CAPATH")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
#: Variables that name a proxy.
PROXIES = (*_PROXIES, *(name.upper() for name in _PROXIES))
#: The proxy that Stockade puts inside, if the policy asks for it.
INSIDE = f"http://{PROXY_ADDRESSES[0]}:{PROXY_PORT}"
#: Variables that name the hosts to reach without a proxy.
NO_PROXIES = ("no_proxy", "NO_PROXY")
#: Files whose own key names a file of certificates, and the variable that says the same. The files
#: themselves are never shown: people keep credentials in them.
SETTINGS = (
    ("PIP_CERT", "cert", ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")),
    ("NPM_CONFIG_CAFILE", "cafile", ("/etc/npmrc", "~/.npmrc")),
)

#: The system's own bundle has a quarter of a megabyte, in 300 files if it is a directory.
MOST_BYTES = 4 << 20
MOST_FILES = 2000
MOST_SETTINGS = 1 << 16
_BEGIN = re.compile(rb"-----BEGIN ([^\n]*?)-----")
_PUBLIC = (b"CERTIFICATE", b"TRUSTED CERTIFICATE", b"X509 CERTIFICATE", b"X509 CRL")
_PROXY = re.compile(
    r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?(?:([^@/?#\s]*)@)?"
    r"((?:[A-Za-z0-9._-]+|\[[A-Za-z0-9.:%_-]+\])(?::[0-9]{1,5})?)/?"
)

#: Given the path of a file and the variable that names it, opens it for the sandbox; None if it is missing.
Opener = Callable[[str, str], "Grant | None"]


class HostNetwork(msgspec.Struct, frozen=True):
    """The variables that are passed, the files that they need, and what was left out."""

    variables: dict[str, str] = {}
    #: The variables that name files or directories, with the real name of each.
    places: tuple[tuple[str, str], ...] = ()
    grants: tuple[Grant, ...] = ()
    #: What was removed from a value, or why it is not passed, one line each.
    notes: tuple[str, ...] = ()
    #: Which variables were not passed, and why.
    warnings: tuple[str, ...] = ()
    #: The clause that asks for a network.
    clause: str = 'net = "open"'
    #: With rules for requests, the file by which servers are verified; "" for the system's.
    roots: str = ""

    def without(self, hidden: HiddenPaths) -> HostNetwork:
        """Return it without the variables that name something that the policy hides."""
        gone = {name: place for name, place in self.places if hidden.covers(place)}
        if not gone:
            return self
        kept = {name: value for name, value in self.variables.items() if name not in gone}
        notes = (f"{name} is not passed: the policy hides {place}" for name, place in gone.items())
        return msgspec.structs.replace(self, variables=kept, notes=(*self.notes, *notes))

    @property
    def lines(self) -> list[str]:
        """What is passed and what is not, one line each."""
        passed = [f"with {name}={value}, because of {self.clause}" for name, value in self.variables.items()]
        return [*passed, *self.notes, *self.warnings]


class _RefusedError(Exception):
    """A variable is not passed; the text says why."""


def find(
    policy: Policy, environ: Mapping[str, str], home: str, is_visible: Callable[[str], bool], opener: Opener
) -> HostNetwork:
    """Find what this environment names and the policy leaves open.

    `is_visible` says whether a path is shown inside already.
    """
    variables: dict[str, str] = {}
    places: list[tuple[str, str]] = []
    grants: dict[str, Grant] = {}
    notes, warnings = [], []
    judged = judges_requests(policy)
    if judged:
        variables = {name: value for name, value in inside_variables().items() if name not in policy.env}
    real_name = functools.cache(os.path.realpath)
    for name, value in () if judged else _certificates(environ, home):
        if name in policy.env:
            continue
        try:
            paths = value.split(":") if name in DIRECTORIES else [value]
            found = [(path, real_name(path)) for path in paths]
            variables[name] = ":".join(
                _shown(path, real, name, is_visible, opener, grants) for path, real in found
            )
            places += ((name, real) for _, real in found)
        except _RefusedError as error:
            warnings.append(f"{name} is not passed: {error}")
    for name in (*PROXIES, *NO_PROXIES):
        value = environ.get(name, "")
        if not value or name in policy.env or name in policy.pass_env:
            continue
        if policy.net != "open":
            if name in PROXIES:
                notes.append(f"{name} is not passed: with rules, Stockade itself connects through the proxy")
            continue
        try:
            variables[name] = value if name in NO_PROXIES else proxy(value)
        except _RefusedError as error:
            warnings.append(f"{name} is not passed: {error}")
            continue
        if "@" in value and name in PROXIES:
            notes.append(
                f"{name} is passed without its user and password: --pass-env {name} would show them inside"
            )
    if policy.proxy:
        own = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), INSIDE)
        own |= dict.fromkeys(NO_PROXIES, "localhost,127.0.0.1,::1")
        taken = (*policy.env, *policy.pass_env)
        variables |= {name: value for name, value in own.items() if name not in taken}
    return HostNetwork(
        variables, tuple(places), tuple(grants.values()), tuple(notes), tuple(warnings), clause(policy),
        _roots(policy, environ, home) if judged else "",
    )  # fmt: skip


def _roots(policy: Policy, environ: Mapping[str, str], home: str) -> str:
    """Return the file by which servers are verified, if it is not the system's."""
    if policy.net_roots:
        return home + policy.net_roots[1:] if policy.net_roots.startswith("~") else policy.net_roots
    return environ.get("SSL_CERT_FILE", "")


def wanted(policy: Policy) -> bool:
    """Whether the policy gives programs a network: the host's, or hosts that a rule allows."""
    return policy.net == "open" or any(not rule.startswith("!") for rule in policy.net)


def clause(policy: Policy) -> str:
    """Return the clause of the policy that asks for a network."""
    return f"net = {show(policy.net)}"


def proxy(value: str) -> str:
    """Return the address of a proxy without its user, password and path.

    >>> proxy("http://me:secret@proxy.example:3128/")
    'http://proxy.example:3128'
    """
    found = _PROXY.fullmatch(value)
    if found is None:
        # A password may have a / or an @ in it, and then no reading of the rest is certain.
        raise _RefusedError("it is not a plain address such as http://proxy.example:3128")
    scheme, _, address = found.groups()
    return f"{scheme}://{address}" if scheme else address


def _certificates(environ: Mapping[str, str], home: str) -> Iterator[tuple[str, str]]:
    """Yield the variables that name certificates, and those that settings of pip and npm imply."""
    for name in (*FILES, *DIRECTORIES):
        if value := environ.get(name):
            yield name, value
    for name, key, files in SETTINGS:
        if name in environ or name.lower() in environ:
            continue
        written = [
            value for file in files if (value := _setting(home + file[1:] if file[0] == "~" else file, key))
        ]
        if written:
            yield name, written[-1]


def _setting(file: str, key: str) -> str:
    """Return the value of a key in a settings file, if it is an absolute path; empty if there is none."""
    try:
        text = _first_bytes(file, MOST_SETTINGS).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = (line.partition("=") for line in text.splitlines())
    found = [value.strip().strip("\"'") for name, _, value in lines if name.strip() == key]
    return found[-1] if found and found[-1].startswith("/") else ""


def _shown(
    path: str,
    real: str,
    name: str,
    is_visible: Callable[[str], bool],
    opener: Opener,
    grants: dict[str, Grant],
) -> str:
    """Show one file or directory of certificates, whose real name is given, and return its name inside."""
    if not path.startswith("/"):
        raise _RefusedError(f"{path!r} is not an absolute path")
    if is_visible(real):
        return path if is_visible(path) else real
    if is_visible(path) or real in grants:  # a link in a tree that programs may write decides nothing
        return real if real in grants else path
    try:
        grant = opener(real, name)
    except PolicyError as error:
        raise _RefusedError(error.message.partition(": ")[2]) from None
    if grant is None:
        raise _RefusedError(f"{path} does not exist")
    problem = _problem_of_directory(grant) if grant.is_dir else _problem(f"/proc/self/fd/{grant.fd}")
    if grant.is_dir is not (name in DIRECTORIES):
        problem = f"is {'a' if grant.is_dir else 'not a'} directory"
    if problem:
        raise _RefusedError(f"{path} {problem}")
    grants[grant.path] = grant
    return grant.path


def _first_bytes(file: str, most: int) -> bytes:
    # Not blocking, in case another process has put a FIFO there since.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        return opened.read(most) or b""


def _problem(file: str) -> str:
    """Say why a file is not one of certificates alone; empty if it is."""
    try:
        data = _first_bytes(file, MOST_BYTES + 1)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) > MOST_BYTES:
        return f"is larger than {MOST_BYTES >> 20} MiB"
    if b"PRIVATE KEY" in data.upper():
        return "has a private key in it"
    kinds = _BEGIN.findall(data)
    return "" if kinds and all(kind in _PUBLIC for kind in kinds) else "is not a file of certificates"


def _problem_of_directory(grant: Grant) -> str:
    """Say why a directory has something else than certificates in it; empty if it has not.

    A link in it shows nothing: its target must be shown for itself.
    """
    if mounted_below(grant.path):
        return "has file systems mounted in it"
    try:
        entries = os.listdir(f"/proc/self/fd/{grant.fd}")
        if len(entries) > MOST_FILES:
            return f"has more than {MOST_FILES} files in it"
        for name in entries:
            file = f"/proc/self/fd/{grant.fd}/{name}"
            mode = os.lstat(file).st_mode
            if stat.S_ISLNK(mode):
                continue
            problem = _problem(file) if stat.S_ISREG(mode) else "is not a file"
            if problem:
                return f"has {name!r} in it, which {problem}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
