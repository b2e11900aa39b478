"""Hints about a failed program whose last words are about a connection that it did not get.

What the program printed only decides which connection it is about: one that the egress refused, one that the
egress allowed and could not make, or one that the kernel refused, because no rule names its port.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stockade.result import Decision, Denial

#: What curl, Python, Node, Bun, Go, git and ssh print if a name does not exist or a connection ends at once.
NO_CONNECTION = re.compile(
    rb"could not resolve|name or service not known|temporary failure in name resolution|no such host"
    rb"|ENOTFOUND|EAI_AGAIN|nodename nor servname|name resolution|getaddrinfo"
    rb"|connection (?:was )?(?:refused|reset|closed|aborted)|closed connection|ECONNREFUSED|ECONNRESET"
    rb"|failed to connect|unable to connect|FailedToOpenSocket|SSL_ERROR_SYSCALL|unexpected eof|EOF occurred"
    rb"|network is unreachable|no matching distribution"
    # A certificate that the program does not accept.
    rb"|CERTIFICATE_VERIFY_FAILED|certificate (?:problem|verif)|issuer certificate|SELF_SIGNED"
    rb"|unknown authority|PKIX path|UnknownIssuer|public key hash|pinned",
    re.IGNORECASE,
)
#: What they print if they want to listen on a port that is taken.
PORT_TAKEN = re.compile(rb"address already in use|EADDRINUSE", re.IGNORECASE)
_PORT = re.compile(rb"(?:\bport:? |\d\.\d{1,3}:|\]:|:::|\*:)(\d{1,5})\b", re.IGNORECASE)
#: Where those messages name a host and a port.
_NAMED = re.compile(
    rb"connect to (?:host )?\[?([A-Za-z0-9._:-]{1,253}?)\]? port (\d{1,5})"
    rb"|(?:ECONNREFUSED|dial tcp) \[?([A-Za-z0-9._:-]{1,253}?)\]?:(\d{1,5})\b"
    rb"|host='([A-Za-z0-9._-]{1,253})', port=(\d{1,5})"
    rb"|server at \"([A-Za-z0-9._-]{1,253})\"[^,\"]{0,60}, port (\d{1,5})",
    re.IGNORECASE,
)
#: Reasons for which a connection that the rules allow is not made.
FAILURES = frozenset(
    {
        "name not found", "resolver failed", "connection refused", "unreachable", "timed out",
        "bad certificate", "certificate refused",
    }
)  # fmt: skip
#: The sandbox itself, as programs name it.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
#: How the addresses begin that our DNS gives to names.
SYNTHETIC = ("198.18.", "198.19.", "fd00:5afe:")


def hint(
    last: bytes, denials: Sequence[Denial], rules: Sequence[str], decisions: Sequence[Decision] = ()
) -> str:
    """Return why the program did not reach a host, and the rule that would allow it.

    It is "" if the last words of the program are about something else.
    """
    if PORT_TAKEN.search(last) is not None:
        return _taken_port(last, rules)
    if NO_CONNECTION.search(last) is None:
        return ""
    denials = [one for one in denials if one.what != "secret"]
    words = last.decode("ascii", "replace").lower()
    named = next((one for one in reversed(denials) if _host(one) in words), None)
    if named is None and (local := _own_port(last, rules)):
        return local
    refused = named or _unnamed_port(last, rules)
    failed = _failed(decisions) if refused is None else None
    if failed is not None and (not denials or (failed.name or failed.address) in words):
        return _failure(failed)
    refused = refused or (denials[-1] if denials else None)
    return "" if refused is None else _refusal(refused)


def _refusal(one: Denial) -> str:
    words = {"name": "the lookup of", "request": "the request", "datagram": "datagrams to"}
    what = words.get(one.what, "a connection to")
    why = f" ({one.reason})" if one.reason not in ("", "no rule") else ""
    allow = f": `{one.hint}` allows it" if one.hint else ""
    if one.clause.startswith("limits."):
        return f"a limit refused {what} {one.target}{why}"
    return f"the network rules refused {what} {one.target}{why}{allow}"


def _failed(decisions: Sequence[Decision]) -> Decision | None:
    """Return the last connection that the rules allow and that Stockade could not make."""
    return next(
        (one for one in reversed(decisions) if one.verdict == "failed" and one.reason in FAILURES), None
    )


def _failure(one: Decision) -> str:
    from stockade.runs.network.decisions import reason_text

    return f"the network rules allow {one.target}, but {reason_text(one)}"


def _taken_port(last: bytes, rules: Sequence[str]) -> str:
    """Return which ports the rules take inside, if the one that the program wanted may be among them."""
    from stockade.policy.net_rules import parse_rule, ports_of

    taken = ports_of([parse_rule(rule) for rule in rules])
    named = {int(port) for port in _PORT.findall(last)}
    ports = [port for port in taken if port in named] or ([] if named else list(taken))
    if not ports:
        return ""
    which = f"port {ports[0]}" if len(ports) == 1 else f"ports {', '.join(map(str, ports))}"
    return f"the network rules take {which} inside: a server there needs another port"


def _own_port(last: bytes, rules: Sequence[str]) -> str:
    """Return how to reach a server of the machine, if the words name a loopback port that no rule has."""
    from stockade.policy.net_rule_set import RuleSet
    from stockade.policy.net_rules import DNS_PORT, parse_rule

    for host, port in reversed(_named(last)):
        if host in LOOPBACK and 1 <= port <= 65535:
            known = RuleSet([parse_rule(rule) for rule in rules])
            if known.for_address("127.0.0.1", port).allowed or port == DNS_PORT:
                return ""
            return (
                f"{host} is the sandbox itself, and nothing listens there on port {port}: "
                f"`--net 127.0.0.1:{port}` leads to a server on your machine"
            )
    return ""


def _named(last: bytes) -> list[tuple[str, int]]:
    """Return the hosts and ports that the words name."""
    return [
        next((host.decode(), int(port)) for host, port in zip(one[::2], one[1::2], strict=True) if host)
        for one in _NAMED.findall(last)
    ]


def _host(denial: Denial) -> str:
    if denial.what == "request":
        return denial.target.partition("://")[2].partition("/")[0].partition(":")[0]
    if denial.what not in ("connection", "datagram"):
        return denial.target
    return denial.target.removeprefix("udp://").rpartition(":")[0].strip("[]")


def _unnamed_port(last: bytes, rules: Sequence[str]) -> Denial | None:
    """Return the refusal that the words name, if no rule allows it: the kernel refuses such ports itself."""
    from stockade.controls import Control
    from stockade.policy.net_errors import NetRuleError
    from stockade.policy.net_rule_set import RuleSet
    from stockade.policy.net_rules import parse_rule, suggest

    for host, port in reversed(_named(last)):
        if host.startswith(SYNTHETIC):
            continue  # it stands for a name that only the egress knows
        try:
            wanted = parse_rule(suggest(host, port))
        except NetRuleError:
            continue
        known = RuleSet([parse_rule(rule) for rule in rules])
        decided = known.for_name(wanted.name, port) if wanted.name else known.for_address(host, port)
        if not decided.allowed:
            return Denial(
                what="connection",
                target=f"{host}:{port}",
                wall=Control.NETWORK_RULES.value,
                clause="net",
                hint=f"--net {wanted.text}",
            )
    return None
