"""The server's own port is denied on every address that leads to it."""

from __future__ import annotations

import pytest

from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import parse_rule
from stockade.server.config import ServerConfig
from stockade.server.supervisor.own_port import own_port_denials


@pytest.mark.parametrize(
    ("listen", "denied", "reached"),
    [
        ("127.0.0.1:8080", {"127.0.0.1", "127.5.5.5", "::1"}, {"192.168.7.2", "20.30.40.50"}),
        ("192.168.7.2:8080", {"127.0.0.1", "::1", "192.168.7.2", "20.30.40.50", "fd00::2"}, set()),
        ("0.0.0.0:8080", {"127.0.0.1", "::1", "192.168.7.2", "20.30.40.50", "fd00::2"}, set()),
        ("[::]:8080", {"127.0.0.1", "::1", "192.168.7.2", "20.30.40.50", "fd00::2"}, set()),
    ],
)
def test_every_address_of_the_server_is_denied_at_its_port(
    listen: str, denied: set[str], reached: set[str]
) -> None:
    allowed = [
        "127.0.0.0/8:8080,9090", "[::1]:8080", "192.168.0.0/16:8080,9090", "[fd00::/8]:8080",
        "20.30.40.50:8080,9090",
    ]  # fmt: skip
    texts = [*allowed, *own_port_denials(ServerConfig(listen=listen))]
    rules = RuleSet([parse_rule(text) for text in texts])
    assert not any(rules.for_address(address, 8080).allowed for address in denied)
    assert all(rules.for_address(address, 8080).allowed for address in reached)
    assert rules.for_address("127.0.0.1", 9090).allowed and rules.for_address("20.30.40.50", 9090).allowed
