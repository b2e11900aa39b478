"""What a program may know of its own policy: the files that it finds inside, in words and as JSON.

They name what the program can see, reach and use anyway. What `deny` and the denying rules of `net` name is
counted and not named, and of the environment only names are listed. Nothing in them depends on more than the
policy and its resolution, so that sandboxes of one policy have one plan.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.policy.model import Limits, Policy, Secret, limit_text
from stockade.policy.profile import Profile
from stockade.resolve.certificates_inside import SECRETS
from stockade.resolve.resolved import ResolvedPolicy

#: Where the files are, in sandboxes with a file tree of their own.
DIRECTORY = "/run/stockade"
WORDS, JSON = "policy.txt", "policy.json"
#: The variable that names the JSON file, in sandboxes without one.
VARIABLE = "STOCKADE_POLICY"
FORMAT = 1
_ACCESS = {
    "read": "read-only",
    "write": "writable for real",
    "overlay": "the workspace, writable: changes are kept aside until the user commits them",
    "private": "private, writable, empty at first, deleted at the end",
}
_NETWORKS = {
    "none": ["none: every connection fails, and so does every lookup of a name"],
    "open": ["the host's"],
}
_END = """
System calls
  no ptrace, mount, bpf or io_uring, no new namespaces; outside, `stockade explain CALL` explains each one

Nothing inside can change this policy. If you lack something, tell the user what, and which clause would allow
it: read, write, net, limits, pass_env.
"""


class PolicyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a program may know of its policy."""

    format: int = FORMAT
    profile: str
    backend: str
    #: The path and the access of the workspace; None without one.
    workspace: dict[str, str] | None
    #: Trees of the system, read-only.
    system: list[str]
    #: The other trees that are shown or private: path and access.
    files: list[dict[str, str]]
    #: Paths of the workspace that stay read-only, or that a commit leaves out.
    protected: list[str]
    #: How many paths and patterns `deny` has.
    hidden: int
    #: What may be executed; None for everything that is shown.
    exec: list[str] | None
    #: `mode`, the rules that `allow`, how many rules deny, whether the user is asked, and the proxy inside.
    network: dict[str, Any]
    #: Placeholders for values that stay outside: name, hosts, the variable and the file that have it.
    secrets: list[dict[str, Any]]
    #: The names of the variables that the policy sets or passes on, if the caller has them.
    environment: list[str]
    limits: dict[str, float]
    syscalls: dict[str, list[str]]
    delegate: bool


class FactSources(msgspec.Struct, frozen=True):
    """The parts of a resolution that the files depend on: equal ones give the same files."""

    policy: Policy
    profile: Profile
    limits: Limits
    backend: str
    #: The path and the access of the workspace and of each grant.
    workspace: tuple[str, str] | None
    grants: tuple[tuple[str, str], ...]
    protected: tuple[str, ...]

    @classmethod
    def of(cls, resolved: ResolvedPolicy, backend: str) -> FactSources:
        """Return what the files of a sandbox depend on, besides its private directories."""
        tree = resolved.workspace
        return cls(
            policy=resolved.policy,
            profile=resolved.profile,
            limits=resolved.limits,
            backend=backend,
            workspace=None if tree is None else (tree.path, tree.access),
            grants=tuple((one.path, one.access) for one in resolved.grants),
            protected=tuple(name for name, _ in resolved.protected),
        )


def policy_files(sources: FactSources, private: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files by name; `private` are the directories that the sandbox has of its own."""
    facts = _facts(sources, private)
    return {WORDS: _words(facts).encode(), JSON: _encoded(facts)}


def _facts(sources: FactSources, private: tuple[str, ...]) -> PolicyFacts:
    policy, workspace, limits = sources.policy, sources.workspace, sources.limits
    files = [*sources.grants, *((path, "private") for path in private)]
    files += [] if workspace is None else [workspace]
    return PolicyFacts(
        profile=policy.profile,
        backend=sources.backend,
        workspace=None if workspace is None else {"path": _plain(workspace[0]), "access": workspace[1]},
        system=[path.removesuffix("?") for path in sources.profile.system],
        files=[{"path": _plain(path), "access": access} for path, access in sorted(files)],
        protected=[_plain(name) for name in sources.protected],
        hidden=len(policy.deny),
        exec=None if policy.exec is None else [_plain(path) for path in policy.exec],
        network=_network(policy),
        secrets=[_secret(name, secret) for name, secret in policy.secrets.items()],
        environment=sorted({*sources.profile.pass_env, *policy.pass_env, *policy.env}),
        limits={
            name: value for name in limits.__struct_fields__ if (value := getattr(limits, name)) is not None
        },
        syscalls={"allow": list(policy.syscalls.allow), "deny": list(policy.syscalls.deny)},
        delegate=policy.delegate,
    )


def _network(policy: Policy) -> dict[str, Any]:
    if isinstance(policy.net, str) or not policy.net:
        mode = "open" if policy.net == "open" else "none"
        return {"mode": mode, "allow": [], "denying": 0, "ask": False, "proxy": None}
    # Only runs with rules need these modules.
    from stockade.policy.net_rules import ASK
    from stockade.resolve.host_network import INSIDE

    denying = [rule for rule in policy.net if rule.startswith("!")]
    return {
        "mode": "rules",
        "allow": [rule for rule in policy.net if rule not in (ASK, *denying)],
        "denying": len(denying),
        "ask": ASK in policy.net,
        "proxy": INSIDE if policy.proxy else None,
    }


def _secret(name: str, secret: Secret) -> dict[str, Any]:
    return {
        "name": name,
        "hosts": list(secret.hosts),
        "variable": None if secret.inside == "file" else name,
        "file": None if secret.inside == "env" else f"{SECRETS}/{name}",
    }


def _secret_words(secret: dict[str, Any]) -> str:
    places = " and ".join(filter(None, (secret["variable"] and f"${secret['variable']}", secret["file"])))
    hosts = " ".join(secret["hosts"])
    return f"{places}: a placeholder; Stockade replaces it by the value in requests to {hosts}"


def _plain(text: str) -> str:
    """Return text that fits on a line and is UTF-8."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _encoded(facts: PolicyFacts) -> bytes:
    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


def _words(facts: PolicyFacts) -> str:
    runs = "every executable file that is shown" if facts.exec is None else f"only {' '.join(facts.exec)}"
    files = [
        f"{' '.join(facts.system)}: of the system, read-only",
        *(f"{one['path']}: {_ACCESS[one['access']]}" for one in facts.files),
        *([f"protected: {' '.join(facts.protected)}"] if facts.protected else []),
        *([f"hidden by {facts.hidden} patterns of `deny`: looks absent"] if facts.hidden else []),
        f"may be executed: {runs}",
    ]
    network = facts.network
    asked = (
        "any other name on these ports, 80 and 443: the user is asked if there is a terminal, and can refuse"
    )
    rest = (
        "addresses and other ports are" if network["ask"] else "other names are not found, other connections"
    )
    rules = [
        *network["allow"],
        *([asked] if network["ask"] else []),
        f"nothing else: {rest} refused",
        *([f"through a proxy too, for programs that insist: {network['proxy']}"] if network["proxy"] else []),
    ]
    limits = [f"{name} = {limit_text(name, value)}" for name, value in facts.limits.items()]
    sections = {
        "Files": files,
        "Network": _NETWORKS.get(facts.network["mode"], rules),
        **({"Secrets": [_secret_words(secret) for secret in facts.secrets]} if facts.secrets else {}),
        "Limits": limits,
        "Environment": [" ".join(facts.environment)],
    }
    head = (
        "This program runs in a sandbox of Stockade. What is not listed here is refused or absent.\n"
        f"{JSON}, beside this file, says the same. Both describe the policy at the start of the sandbox.\n"
    )
    body = "".join(
        f"\n{name}\n" + "".join(f"  {line}\n" for line in lines) for name, lines in sections.items()
    )
    return head + body + _END
