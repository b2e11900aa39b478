"""What a change of the policy would give away: a warning for each change that an answer names."""

from __future__ import annotations

import os

from stockade.linux.path_lookup import covers
from stockade.policy.net_addresses import forbidden_address
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain.installs import SECRETS, looks_like_home

#: Sockets that stand for the whole machine.
ENGINES = ("docker.sock", "containerd.sock", "podman.sock", "crio.sock", "libvirt-sock", "snapd.socket")
#: Files of /etc that hold what must stay secret.
ETC_SECRETS = ("shadow", "gshadow", "sudoers", "ssh", "ssl/private", "pki/tls/private", "krb5.keytab")
#: Names of files that usually hold a secret, wherever they are.
SECRET_NAMES = (
    ".env", ".netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials", "id_rsa", "id_ed25519", "id_ecdsa",
    "credentials", "credentials.json", ".htpasswd", "kubeconfig",
)  # fmt: skip
#: Files that a tool of the host runs or obeys as soon as they change.
STARTUP = (".bashrc", ".profile", ".bash_profile", ".zshrc", ".config/fish", ".config/autostart", "bin")


def is_secret(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether a path is in a place for secrets: a denial must not say whether it exists."""
    home = os.path.realpath(resolved.caller.home)
    places = (*(f"{home}/{name}" for name in SECRETS), *(f"/etc/{name}" for name in ETC_SECRETS))
    return any(covers(place, path) for place in places)


def of_reading(path: str, resolved: ResolvedPolicy) -> str:
    """Return the warning for a policy that shows a path; empty if there is nothing to warn about."""
    home = os.path.realpath(resolved.caller.home)
    for name in SECRETS:
        if covers(f"{home}/{name}", path):
            return f"~/{name} is a place for secrets: a program that reads them can pass them on"
        if covers(path, f"{home}/{name}") and path != "/":
            return f"{path} contains ~/{name}, a place for secrets"
    if covers(path, home):
        return f"{path} contains your whole home, with everything secret in it"
    if os.path.basename(path) in SECRET_NAMES:
        return "a file of this name usually holds a password, token or key"
    if any(covers(f"/etc/{name}", path) for name in ETC_SECRETS) or path == "/etc":
        return "it holds passwords or keys of this machine"
    if looks_like_home(path):
        return f"{path} looks like somebody's home"
    if os.path.basename(path) in ENGINES:
        return "a program that reaches this socket controls the whole machine"
    return ""


def of_writing(path: str, resolved: ResolvedPolicy) -> str:
    """Return the warning for a policy that lets a program write to a path for real."""
    home = os.path.realpath(resolved.caller.home)
    if secret := of_reading(path, resolved):
        return secret
    for name in STARTUP:
        if covers(f"{home}/{name}", path) or covers(path, f"{home}/{name}"):
            return "your shell or desktop runs what is there: the program could run as you, outside"
    return "changes there are real: they land on the host at once, and no diff or commit stands between"


def of_host(host: str) -> str:
    """Return the warning for a rule that allows a host or an address."""
    kind = forbidden_address(host) if _is_address(host) else ""
    if kind == "metadata" or host in ("metadata.google.internal", "metadata"):
        return "a cloud's metadata service hands out the credentials of this machine"
    if kind == "loopback" or host == "localhost":
        return "it leads to the servers of your own machine, which often trust whoever reaches them"
    if kind:
        return f"it is a {kind} address: it leads into your own network"
    return ""


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


NET_OPEN = "it shares the host's whole network: every host, your own network and the servers of this machine"
MORE_CALLS = "each further call is more of the kernel that a hostile program can attack"
MULTICAST = (
    "a program that joins many groups holds the kernel's lock of all networks: other sandboxes and programs "
    "of this machine wait for it"
)
UNPROTECT = "a tool of the host runs or obeys it: the program could run outside, as you, at your next command"
REAL_CHANGES = (
    'in mode "rw" every change is real: no diff or commit stands between the program and your files'
)
SOCKETS = "a program that reaches a socket of the host can ask the server behind it for anything"
