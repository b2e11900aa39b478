"""What an egress process is told and handed: the settings of the policy, and its first message."""

from __future__ import annotations

import _socket as socket
import os
from collections.abc import Mapping, Sequence

from stockade.egress.records import create_records
from stockade.gate.network import DNS_PORT, NetworkListeners
from stockade.gate.operations import Plan
from stockade.linux.root_certificates import system_bundle
from stockade.policy.model import NETWORK_LIMITS
from stockade.policy.net_rules import PROXY_PORT, parse_rule, ports_of
from stockade.receipt.statement import ResolverWalls
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.network.egress_process import EgressProcess, egress_plan
from stockade.runs.network.published_ports import PublishedListeners
from stockade.runs.network.resolver_process import connect_resolver
from stockade.runs.network.trust_files import TrustFiles, read_roots
from stockade.runs.network.upstream_proxy import proxies_of
from stockade.runs.prepare import RunPreparation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.secret_values import SecretValues
    from stockade.runs.network.user_questions import UserQuestions

#: How many connections an egress process relays at once, and how long one may be silent, in seconds.
MOST_CONNECTIONS, IDLE_SECONDS = 1024, 3600


def egress_settings(prepared: RunPreparation) -> dict[str, object]:
    """Return what the policy says to every egress process of a sandbox besides the rules."""
    policy, found = prepared.resolved.policy, dict[str, object]()
    limits = {name: getattr(prepared.resolved.limits, name) for name in NETWORK_LIMITS}
    if written := {name: value for name, value in limits.items() if value is not None}:
        found["limits"] = written
    if not policy.net or policy.net == "open":
        return found
    if policy.proxy:
        found["proxy"] = True
    if proxies := proxies_of(prepared.resolved.caller.environ):
        found["upstream"] = proxies.settings()
    return found


def dialled_ports(ports: Sequence[int], settings: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ports that the egress process may dial: those of the rules and of the host's proxies."""
    upstream = settings.get("upstream")
    proxies = upstream["proxies"].values() if isinstance(upstream, dict) else ()
    return tuple(sorted({*ports, *(one[2] for one in proxies)}))


def planned_egress(prepared: RunPreparation) -> tuple[Plan, tuple[int, ...], tuple[int, ...]]:
    """Return the plan of the egress process, and the TCP and the UDP ports of the listeners inside."""
    rules = [parse_rule(rule) for rule in prepared.resolved.policy.net]
    ports, datagrams = ports_of(rules), ports_of(rules, udp=True)
    settings = egress_settings(prepared)
    own = (PROXY_PORT,) if settings.get("proxy") else ()
    plan = egress_plan(dialled_ports(ports, settings), prepared.state, udp=bool(datagrams))
    return plan, tuple(sorted({*ports, *own, DNS_PORT})), tuple(sorted({*datagrams, DNS_PORT}))


def configure(
    process: EgressProcess,
    box: LaunchedSandbox,
    home: str,
    nudge: int,
    settings: Mapping[str, object],
    opened: NetworkListeners | None,
    published: PublishedListeners | None,
    events: Events,
    names: tuple[int, ...] = (),
    questions: UserQuestions | None = None,
    trust: TrustFiles | None = None,
    roots: str = "",
    secrets: SecretValues | None = None,
) -> Steps[tuple[int, ResolverWalls | None]]:
    """Hand an egress process its listeners and the rest, and wait until it relays.

    Returns its records, and the walls of the resolver that it asks, if it has one.

    `names` is a file with the names of the process before it, if there is one; `settings` have the rules.
    The memory of `secrets` is wiped.
    """
    records = create_records()
    held: list[int] = []
    walls: ResolverWalls | None = None
    try:
        message: dict[str, object] = {
            "tcp": [], "udp": [], "resolver": opened is not None, "publish": [],
            "connections": MOST_CONNECTIONS, "idle": IDLE_SECONDS, **settings,
        }  # fmt: skip
        passed = [records, nudge]
        if opened is not None:
            resolver, asked = yield from connect_resolver(events, home)
            walls = ResolverWalls(asked.plan, asked.filter, asked.uid)
            held.append(resolver)
            message["tcp"] = [[port, family] for port, family, _ in opened.tcp]
            message["udp"] = [[port, family] for port, family, _ in opened.udp]
            message["ipv6"] = opened.ipv6
            passed += [resolver, *opened.sockets]
        if published is not None:
            message["publish"] = [one.port for one in published.ports]
            channel = _serve_connections(box)
            held.append(channel)
            passed += [*published.descriptors, channel]
        if questions is not None:
            held.append(asked_on := questions.connect())
            message["ask"] = True
            passed.append(asked_on)
        own_roots = read_roots(roots) if trust is not None and roots else b""
        if trust is not None:
            message["http"] = len(own_roots)
            if own_roots:
                held.append(_in_memory(own_roots))
                passed.append(held[-1])
        values = None
        if secrets is not None:
            message["secrets"], values = secrets.described, secrets.view
        authority = yield from process.configure(message, (*passed, *names), events, values)
        if secrets is not None:
            secrets.observe(process.pid)
        if trust is not None:
            trust.fill(authority, own_roots or read_roots(system_bundle()))
        return records, walls
    except BaseException:
        os.close(records)
        raise
    finally:
        if secrets is not None:
            secrets.memory.close()
        for descriptor in held:
            os.close(descriptor)


def _in_memory(content: bytes) -> int:
    """Return a descriptor from which an egress process, which has no files, reads content."""
    descriptor = os.memfd_create("roots", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def _serve_connections(box: LaunchedSandbox) -> int:
    """Let the sandbox's init serve connections to its ports; return the end on which to ask for them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        box.connection.serve_publisher(theirs.fileno())
        return ours.detach()
    finally:
        theirs.close()
        ours.close()
