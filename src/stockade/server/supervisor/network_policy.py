"""The network policy of a living sandbox, which clients read and change: `/policy` of the egress plane."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from litestar import Controller, delete, get, patch, put

from stockade.server.supervisor.sandbox_policy import guarded, refuse_beyond_ceiling
from stockade.server.wire.errors import CONFLICT, ApiError
from stockade.server.wire.network import (
    DENY,
    NetworkPolicyAnswer,
    NetworkPolicySpec,
    NetworkRule,
    NetworkStatus,
    bounded,
    checked_policy,
    checked_rules,
    net_of,
    rules_of,
    target_key,
)

if TYPE_CHECKING:
    from stockade.server.supervisor.supervisor import SandboxSupervisor


class NetworkPolicy:
    """What a sandbox may reach, and the change of it."""

    def __init__(self, supervisor: SandboxSupervisor) -> None:
        self._supervisor = supervisor
        configured = supervisor.config.network
        self._rules = supervisor.record.network
        if self._rules is None:
            self._rules = rules_of(() if isinstance(configured, str) else configured)
        #: Held while a change is under way: each builds on the one before.
        self._changing = asyncio.Lock()
        #: Whether the sandbox has an egress whose rules can change.
        self._can_change = bool(supervisor.policy.net)

    def status(self) -> NetworkStatus:
        """Return the policy that is in force."""
        return NetworkStatus(NetworkPolicyAnswer(DENY, self._rules or ()))

    async def merge(self, rules: list[NetworkRule]) -> NetworkStatus:
        """Put rules in the place of those with the same target, and add the others."""
        checked = checked_rules(rules, "rules")
        async with self._changing:
            found = {target_key(rule.target): rule for rule in self._rules or ()}
            found |= {target_key(rule.target): rule for rule in checked}
            return await self._change(bounded(tuple(found.values()), "rules"))

    async def replace(self, spec: NetworkPolicySpec) -> NetworkStatus:
        """Put a whole policy in the place of this one."""
        checked = checked_policy(spec, "policy")
        async with self._changing:
            return await self._change(checked)

    async def remove(self, targets: list[str]) -> NetworkStatus:
        """Remove the rules with these targets; it does not matter if there are none."""
        gone = set(map(target_key, targets))
        async with self._changing:
            kept = tuple(rule for rule in self._rules or () if target_key(rule.target) not in gone)
            return await self._change(kept)

    async def _change(self, rules: tuple[NetworkRule, ...]) -> NetworkStatus:
        if rules == self._rules:
            return self.status()
        if not self._can_change:
            raise ApiError(
                409, CONFLICT, "the sandbox has no network: ask for it with networkPolicy when you create one"
            )
        supervisor = self._supervisor
        net = guarded(net_of(rules), supervisor.config)
        policy = msgspec.structs.replace(supervisor.policy, net=net)
        refuse_beyond_ceiling(policy, supervisor.config)
        await supervisor.box.net.replace(*net)
        supervisor.policy, self._rules = policy, rules
        supervisor.set_network(rules)
        return self.status()


class PolicyController(Controller):
    """The network policy of the sandbox."""

    path = "/policy"
    tags = ("network",)

    @get("/")
    async def show(self, network: NetworkPolicy) -> NetworkStatus:
        """Show the policy that is in force."""
        return network.status()

    @patch("/", status_code=200)
    async def merge(self, network: NetworkPolicy, data: list[NetworkRule]) -> NetworkStatus:
        """Add rules, or replace those with the same target."""
        return await network.merge(data)

    @put("/", status_code=200)
    async def replace(self, network: NetworkPolicy, data: NetworkPolicySpec) -> NetworkStatus:
        """Replace the whole policy."""
        return await network.replace(data)

    @delete("/", status_code=200)
    async def remove(self, network: NetworkPolicy, data: list[str]) -> NetworkStatus:
        """Remove the rules with these targets."""
        return await network.remove(data)
