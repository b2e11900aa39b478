"""The hosts that a program asked for: rules for the public ones, and questions about the others.

The egress refuses a name that no rule allows, and records it. So a host is learned in steps: its name in one
run, the port in the next, and the rule in the end allows no more ports than the program used. A name without
a connection keeps the ports of a web server. Rules for addresses that are not public, and rules that pass on
bytes unseen, are questions.
"""

from __future__ import annotations

from collections.abc import Iterable

from stockade.observe.access import Access, Action
from stockade.observe.learning.lesson import LearnedEntry, LearnQuestion, by_programs
from stockade.policy.net_addresses import forbidden_address
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import normal_name
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import DNS_PORT, parse_rule
from stockade.policy.values import quote
from stockade.result import Decision

#: How many hosts a learned policy allows, and how many ports besides those of web servers are tried.
MOST_HOSTS = 64
MOST_PORTS = 8
MOST_QUESTIONS = 16
#: Denies a name that nobody can own: with this rule alone a sandbox reaches nothing, and Stockade records
#: what programs ask for.
RECORDING = "!learn.stockade.invalid"
WEB = (80, 443)
#: How the addresses begin that stand for names inside: only the egress knows which.
SYNTHETIC = ("198.18.", "198.19.", "fd00:5afe:")
#: Reasons for which the egress refuses a connection that a rule for a host allows.
_NOT_SEEN_THROUGH = {
    "no SNI": "it begins TLS without naming the host",
    "SNI differs": "its TLS hello names another host",
    "Host differs": "its requests name another host",
    "not TLS": "it does not speak TLS on port 443",
    "not HTTP": "it does not speak HTTP on port 80",
}


class HostLearner:
    """Collects what programs asked of the network, over several runs."""

    def __init__(self, given: Iterable[str] = ()) -> None:
        self._given = RuleSet([parse_rule(rule) for rule in given])
        #: By name: the ports that programs used.
        self._names: dict[str, set[int]] = {}
        self._programs: dict[str, set[str]] = {}
        self._addresses: dict[tuple[str, int], set[str]] = {}
        self._ports: set[int] = set()
        #: Names to which no connection is allowed, although a rule names them: they need none.
        self._barred: set[str] = set()
        self._questions: dict[str, LearnQuestion] = {}

    def add(self, decisions: Iterable[Decision], connects: Iterable[Access] = ()) -> None:
        """Take in what the egress decided in one run, and the connections that it could not see.

        Those are the ones that the kernel refused, and all to addresses that stand for names: no rule has
        their port yet.
        """
        for one in decisions:
            if one.kind in ("name", "connect"):
                self._take(one)
        for access in connects:
            if access.action is Action.CONNECT and not access.target.startswith("unix:"):
                self._take_access(access)

    def rules(self, *, settled: bool = False) -> tuple[LearnedEntry, ...]:
        """Return the rules for the next run, or the ones for the policy, which name only ports in use."""
        found = []
        for name, used in self._names.items():
            if name in self._barred and not used:
                continue
            ports = sorted(used) or sorted({*WEB, *(() if settled else self._ports)})
            if not settled:
                ports = sorted({*ports, *self._ports})
            programs = by_programs(self._programs[name])
            why = programs if used else "; ".join(filter(None, ("looked up only", programs)))
            found.append(LearnedEntry(parse_rule(f"{name}:{','.join(map(str, ports))}").text, why))
        for (address, port), by in self._addresses.items():
            host = f"[{address}]" if ":" in address else address
            found.append(LearnedEntry(parse_rule(f"{host}:{port}").text, by_programs(by)))
        return tuple(found)

    @property
    def knows_ports(self) -> bool:
        """Whether programs connected to every name, so that its rule need not guess the port."""
        return all(used or name in self._barred for name, used in self._names.items())

    @property
    def questions(self) -> tuple[LearnQuestion, ...]:
        return tuple(self._questions.values())

    def _take(self, one: Decision) -> None:
        program = (one.process or "").rpartition(" (")[0]
        if one.verdict == "denied" and one.reason == "deny rule":
            self._ask(one.target, f"a rule of the policy denies it: {one.rule}")
        elif one.verdict == "denied" and one.reason in _NOT_SEEN_THROUGH and one.name and one.port:
            self._barred.add(one.name)
            why = (
                f"{_NOT_SEEN_THROUGH[one.reason]}: this rule passes on bytes that Stockade does not look into"
            )
            self._ask(one.target, why, f"tcp://{one.name}:{one.port}")
        elif one.verdict == "denied" and one.reason.endswith(" address"):
            self._barred.add(one.name)
            host = f"[{one.address}]" if ":" in one.address else one.address
            rules = [f"{name}:{one.port}" for name in (one.name, host) if name and one.port]
            self._ask(one.target, f"it leads to a {one.reason}, in your own network or machine", *rules)
        elif one.name:
            self._take_name(one, program)
        elif one.kind == "connect" and one.address and one.port and one.verdict == "denied":
            self._take_address(one.address, one.port, program)

    def _take_name(self, one: Decision, program: str) -> None:
        try:
            name = normal_name(one.name)
            parse_rule(parse_rule(f"{name}:80,443").text)  # a host can be called `open`
        except NetRuleError:
            return
        if any(self._given.for_name(name, port).allowed for port in ([one.port] if one.port else WEB)):
            return
        if name not in self._names and len(self._names) + len(self._addresses) >= MOST_HOSTS:
            self._ask("more hosts than are listed here", f"a learned policy allows at most {MOST_HOSTS}")
            return
        used = self._names.setdefault(name, set())
        self._programs.setdefault(name, set()).add(program)
        if one.kind == "connect" and one.port and (one.port in used or len(used) < MOST_PORTS):
            used.add(one.port)

    def _take_access(self, access: Access) -> None:
        host, _, digits = access.target.rpartition(":")
        host = host.strip("[]")
        port = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else 0
        if not 0 < port < 65536 or port == DNS_PORT:
            return
        if host.startswith(SYNTHETIC):
            if len(self._ports) < MOST_PORTS and port not in WEB:
                self._ports.add(port)
        else:
            self._take_address(host, port, access.program)

    def _take_address(self, address: str, port: int, program: str) -> None:
        kind = forbidden_address(address)
        if kind == "not an address" or self._given.for_address(address, port).allowed:
            return
        if kind:
            rule = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            where = "your own machine" if kind == "loopback" else "your own network"
            self._ask(rule, f"it is a {kind} address, in {where}", rule)
        elif (address, port) in self._addresses or len(self._names) + len(self._addresses) < MOST_HOSTS:
            self._addresses.setdefault((address, port), set()).add(program)
        else:
            self._ask("more hosts than are listed here", f"a learned policy allows at most {MOST_HOSTS}")

    def _ask(self, target: str, why: str, *rules: str) -> None:
        if len(self._questions) >= MOST_QUESTIONS:
            target, why, rules = "more than is listed here", "the program tried too many", ()
        allow = f"net = [{', '.join(map(quote, rules))}]" if rules else ""
        self._questions.setdefault(target, LearnQuestion(f"connect to {target}", why, allow))
