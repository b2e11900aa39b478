"""`box.net`: the network rules of a living sandbox, which may change, and its published ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import stockade
from stockade.errors import PolicyError
from stockade.runs.io import async_eventloop
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.network.published_ports import PublishedPort

if TYPE_CHECKING:
    from stockade.runs.launch import LaunchedSandbox
    from stockade.runs.prepare import RunPreparation


class NetworkView:
    """What `SandboxNetwork` and `AsyncSandboxNetwork` share: everything but the waiting."""

    def __init__(self, sandbox: stockade.Sandbox | stockade.AsyncSandbox) -> None:
        self._living = sandbox

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules in force now. Without rules, and with the host's network, there are none."""
        egress = self._living._require_open()[0].egress
        return () if egress is None else egress.in_force

    def decisions(self, cursors: dict[int, int]) -> list[stockade.result.Decision]:
        """Return what was decided since an earlier call with the same dict; begin with an empty one.

        The result of a run has all its decisions, whatever was read here.
        """
        egress = self._living._require_open()[0].egress
        return [] if egress is None else egress.changed_decisions(cursors)

    @property
    def published(self) -> tuple[PublishedPort, ...]:
        """The published ports: `host`, `host_port`, `port`, and `address` for URLs.

        >>> import stockade
        >>> with stockade.Sandbox(publish=["0:8080"]) as box:
        ...     [(one.host, one.port) for one in box.net.published]
        [('127.0.0.1', 8080)]
        """
        made = self._living._require_open()[1].made.published
        return () if made is None else made.ports

    def _allow_steps(
        self, box: LaunchedSandbox, prepared: RunPreparation, rules: tuple[str, ...], events: Events
    ) -> Steps[None]:
        from stockade.runs.network.egress_changes import change_rules, with_allowed

        own, check = _policy_rules(prepared), _check_of(box, prepared)
        return (
            yield from change_rules(
                box, prepared.state, lambda now: with_allowed(now, rules, own), check, events
            )
        )

    def _deny_steps(
        self, box: LaunchedSandbox, prepared: RunPreparation, rules: tuple[str, ...], events: Events
    ) -> Steps[None]:
        from stockade.runs.network.egress_changes import change_rules, with_denied

        _policy_rules(prepared)
        nothing: Callable[[tuple[str, ...]], object] = len  # deny rules only narrow
        return (
            yield from change_rules(box, prepared.state, lambda now: with_denied(now, rules), nothing, events)
        )

    def _replace_steps(
        self, box: LaunchedSandbox, prepared: RunPreparation, rules: tuple[str, ...], events: Events
    ) -> Steps[None]:
        from stockade.runs.network.egress_changes import change_rules, exactly

        _policy_rules(prepared)
        wanted = exactly(rules)
        return (
            yield from change_rules(box, prepared.state, lambda now: wanted, _check_of(box, prepared), events)
        )


class SandboxNetwork(NetworkView):
    """The network of a living `Sandbox`: `box.net`."""

    _living: stockade.Sandbox

    def allow(self, *rules: str) -> None:
        """Let programs reach more, from now on: each rule as `net` has it, such as "api.example.com:443".

        A rule that `deny` has added by the same words is taken back. If your layers have a ceiling, the rules
        must be within it. Raises PolicyError for rules that the sandbox cannot have.
        """
        with self._living._in_use() as (box, prepared), Events() as events:
            drive(self._allow_steps(box, prepared, rules, events), events)

    def deny(self, *rules: str) -> None:
        """Let programs reach less, from now on: "host", "*.host", an address or a network, or with ports.

        Connections that are open go on.
        """
        with self._living._in_use() as (box, prepared), Events() as events:
            drive(self._deny_steps(box, prepared, rules, events), events)

    def replace(self, *rules: str) -> None:
        """Let programs reach exactly what these rules allow, from now on. Connections that are open go on."""
        with self._living._in_use() as (box, prepared), Events() as events:
            drive(self._replace_steps(box, prepared, rules, events), events)


class AsyncSandboxNetwork(NetworkView):
    """The network of a living `AsyncSandbox`: `box.net`."""

    _living: stockade.AsyncSandbox

    async def allow(self, *rules: str) -> None:
        """Let programs reach more, as `SandboxNetwork.allow` does."""
        async with self._living._in_use() as (box, prepared):
            with Events() as events:
                await async_eventloop.drive(self._allow_steps(box, prepared, rules, events), events)

    async def deny(self, *rules: str) -> None:
        """Let programs reach less, as `SandboxNetwork.deny` does."""
        async with self._living._in_use() as (box, prepared):
            with Events() as events:
                await async_eventloop.drive(self._deny_steps(box, prepared, rules, events), events)

    async def replace(self, *rules: str) -> None:
        """Let programs reach exactly what these rules allow, as `SandboxNetwork.replace` does."""
        async with self._living._in_use() as (box, prepared):
            with Events() as events:
                await async_eventloop.drive(self._replace_steps(box, prepared, rules, events), events)


def _policy_rules(prepared: RunPreparation) -> tuple[str, ...]:
    """Return the rules of a sandbox's policy, or refuse a sandbox that has none."""
    net = prepared.resolved.policy.net
    if net == "open":
        raise PolicyError(
            "the sandbox has the host's whole network, so it has no rules that could change",
            hint='write net = ["api.example.com"] in its policy instead of net = "open"',
        )
    return net


def _check_of(box: LaunchedSandbox, prepared: RunPreparation) -> Callable[[tuple[str, ...]], object]:
    from stockade.runs.network.rule_checks import check_of

    questions = None if box.egress is None else box.egress.questions
    return check_of(prepared, frozenset() if questions is None else frozenset(questions.rules))
