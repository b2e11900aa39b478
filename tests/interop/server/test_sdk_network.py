"""The published Python SDK, unmodified: the network policy of a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

ALLOWED = NetworkRule(action="allow", target="good.example")


@pytest.fixture(scope="module")
def guarded(connection: ConnectionConfigSync) -> Iterator[SandboxSync]:
    policy = NetworkPolicy(default_action="deny", egress=[ALLOWED])
    box = SandboxSync.create("host", connection_config=connection, network_policy=policy)
    yield box
    box.destroy()


def rules(box: SandboxSync) -> dict[str, str]:
    return {rule.target: rule.action for rule in box.get_egress_policy().egress or []}


def test_a_sandbox_without_a_policy_has_the_servers(sandbox: SandboxSync) -> None:
    policy = sandbox.get_egress_policy()
    assert policy.default_action == "deny" and not policy.egress


def test_the_policy_of_the_request_is_in_force(guarded: SandboxSync) -> None:
    assert guarded.get_egress_policy().default_action == "deny"
    assert rules(guarded)["good.example"] == "allow"


def test_rules_are_merged_by_target_and_deleted_by_target(guarded: SandboxSync) -> None:
    guarded.patch_egress_rules(
        [
            NetworkRule(action="deny", target="good.example"),
            NetworkRule(action="allow", target="*.other.example"),
            NetworkRule(action="deny", target="*.other.example"),
        ]
    )
    assert rules(guarded) == {"good.example": "deny", "*.other.example": "allow"}
    guarded.delete_egress_rules(["*.other.example", "never.example"])
    assert rules(guarded) == {"good.example": "deny"}
    guarded.patch_egress_rules([ALLOWED])
    assert rules(guarded) == {"good.example": "allow"}


def test_the_control_plane_has_the_same_policy(
    guarded: SandboxSync, connection: ConnectionConfigSync
) -> None:
    url = f"http://{connection.domain}/v1/sandboxes/{guarded.id}/networkpolicy"
    answer = httpx.get(url, headers={"OPEN-SANDBOX-API-KEY": connection.api_key or ""})
    assert answer.status_code == 200
    assert answer.json()["policy"]["egress"] == [{"action": "allow", "target": "good.example"}]


def test_a_rule_that_is_none_is_refused(guarded: SandboxSync) -> None:
    with pytest.raises(SandboxApiException) as caught:
        guarded.patch_egress_rules([NetworkRule(action="allow", target="not a host!")])
    assert caught.value.status_code == 400
