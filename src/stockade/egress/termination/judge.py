"""The judgement of one request: what the rules say, and what no rule can allow.

A request is refused if servers could read it in different ways. That concerns its target
(`policy.http_rules`), and headers that replace a part of the request after the fact (`override_fields`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from stockade.egress.termination.messages import RequestHead
from stockade.egress.termination.override_fields import check_hosts, check_overrides, override_methods
from stockade.policy.http_rules import check_method
from stockade.policy.http_targets import AmbiguousTargetError, LongTargetError, Target, read_target
from stockade.policy.net_rule_set import NetDecision

#: The parameter of a query whose value some frameworks take for the method.
_METHOD_PARAMETER = "_method"


class RequestRules(Protocol):
    """What the judge asks of the rules."""

    def for_request(self, name: str, port: int, method: str, target: Target) -> tuple[NetDecision, int]:
        """Decide about a request; also return the place of the rule that decided, or -1."""


class JudgedRequest(NamedTuple):
    """A request and what became of it; one that is allowed has no reason."""

    #: What records show: method and URL without the query.
    shown: str
    #: One of `records.REASONS`; empty if the request is allowed.
    reason: str
    rule: int
    #: What the program gets if the request is refused.
    status: int = 0
    text: str = ""


class RequestJudge:
    """Judges the requests of connections to one host and port."""

    def __init__(
        self,
        rules: Callable[[], RequestRules],
        scheme: str,
        host: str,
        port: int,
        spend: Callable[[], str] | None = None,
    ) -> None:
        """Take the rules and the host, and what counts a request: it returns the limit that is used up."""
        self._rules, self.scheme, self.host, self.port = rules, scheme, host, port
        self._spend = spend
        usual = {"https": 443, "http": 80}[scheme] == port
        self.authority = host if usual else f"{host}:{port}"

    def judge(self, head: RequestHead) -> JudgedRequest:
        """Return whether the rules of this moment allow a request."""
        if not check_method(head.method):
            shown = self._shown(head.method, "/")
            return JudgedRequest(shown, "ambiguous request", -1, 400, "its method is not one in capitals")
        try:
            target = read_target(head.target)
            shown = self._shown(head.method, target.path)
            check_overrides(head)
            allowed, place = self._decide(_methods(head, target), target)
        except AmbiguousTargetError as error:
            shown = self._shown(head.method, head.target.partition("?")[0])
            reason = "limit" if isinstance(error, LongTargetError) else "ambiguous request"
            return JudgedRequest(shown, reason, -1, 400, str(error))
        if not allowed:
            reason = "deny rule" if place >= 0 else "no rule"
            text = "a rule denies it" if place >= 0 else "no rule allows it"
            return JudgedRequest(shown, reason, place, 403, text)
        return self._counted(shown, place)

    def _decide(self, methods: set[str], target: Target) -> tuple[bool, int]:
        """Return whether the rules allow a request with each of these methods, and the rule that decided."""
        place = -1
        for method in methods:
            decision, place = self._rules().for_request(self.host, self.port, method, target)
            if not decision.allowed:
                return False, place
        return True, place

    def _counted(self, shown: str, place: int) -> JudgedRequest:
        """Allow a request, unless the sandbox has used up its requests."""
        if self._spend is not None and (clause := self._spend()):
            return JudgedRequest(shown, clause, -1, 403, f"the sandbox has used up {clause}")
        return JudgedRequest(shown, "", place)

    def refused(self, method: str, reason: str, status: int, text: str) -> JudgedRequest:
        """Return the refusal of a request that could not be decoded."""
        return JudgedRequest(self._shown(method or "?", "/"), reason, -1, status, text)

    def _shown(self, method: str, path: str) -> str:
        return f"{method[:32]} {self.scheme}://{self.authority}{path}"


class HostJudge(RequestJudge):
    """Judges the requests of a connection for which a rule allows everything that its host offers."""

    def __init__(self, host: str, port: int, spend: Callable[[], str] | None) -> None:
        super().__init__(_no_rules, "http", host, port, spend)

    def judge(self, head: RequestHead) -> JudgedRequest:
        """Return whether the sandbox may send another request, and no header names another host."""
        shown = self._shown(head.method, head.target.partition("?")[0])
        try:
            check_hosts(head)
        except AmbiguousTargetError as error:
            return JudgedRequest(shown, "ambiguous request", -1, 400, str(error))
        return self._counted(shown, -1)


def _no_rules() -> RequestRules:
    raise AssertionError("a plain rule has no rules for requests")


def _methods(head: RequestHead, target: Target) -> set[str]:
    """Return the methods that a server may take for that of the request."""
    found = {head.method} | override_methods(head.fields)
    for query in target.queries:
        for value in query.values.get(_METHOD_PARAMETER, ()):
            if not check_method(value.upper()):
                raise AmbiguousTargetError(f"its {_METHOD_PARAMETER} is not a method")
            found.add(value.upper())
    return found
