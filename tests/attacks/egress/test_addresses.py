"""Addresses as a way out: odd spellings, the machine itself, its metadata, and names that lead there."""

from __future__ import annotations

from typing import Any

import pytest

from attacks.egress.reach import Reach
from support.internet_layout import DNS
from support.means import need

GET = "GET / HTTP/1.1\r\nHost: api.good.example\r\nConnection: close\r\n\r\n"
#: As a program may write them; each reaches a server outside.
IPV4 = (
    "127.0.0.1",
    "127.1",
    "0x7f.1",
    "2130706433",
    "0177.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "169.254.169.254",
    "0xa9fea9fe",
    "100.100.100.200",
    "10.0.0.5",
    "11.0.0.66",
)
IPV6 = (
    "::1",
    "::",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "fd00:ec2::254",
    "fd00:dead::5",
    "2a10:600d::66",
)
#: Those that lead to no machine here, so there is no server to reach outside either.
NOWHERE = (
    "::1%lo",
    "255.255.255.255",
    "224.0.0.1",
    "240.0.0.1",
    "192.88.99.1",
    "198.18.77.7",
    "fe80::1%lo",
    "ff02::1%lo",
    "fd00:5afe::7777",
    "2001:0:a9fe:a9fe::1",
    "64:ff9b:1::a9fe:a9fe",
)


#: Of those, the ones that are public, which the rule `*` allows.
PUBLIC = ("11.0.0.66", "2a10:600d::66")


def targets(reach: Reach) -> list[str]:
    return [*IPV4, *(IPV6 if reach.internet.ipv6 else ())]


def test_no_spelling_of_an_address_gets_past_rules_for_names(reach: Reach) -> None:
    attack = [[address, 80, GET] for address in targets(reach)]
    outside = reach.outside("dials", attack)
    assert all(answer.startswith("HTTP/1.1 200") for answer in outside.values()), outside
    more = [[address, port, GET] for address in NOWHERE for port in (80, 443)]
    inside = reach.inside("dials", attack + more, net=["api.good.example", "*.good.example"])
    assert not any(answer.startswith("HTTP") for answer in inside.verdict.values()), inside.verdict
    assert reach.internet.events() == []


def test_the_rule_for_every_host_leads_to_public_addresses_alone(reach: Reach) -> None:
    names = ("api.good.example", "evil.example", "metadata.evil.example", "local.evil.example")
    attack = [[place, 80, GET.replace("api.good.example", place)] for place in (*targets(reach), *names)]
    outside = reach.outside("dials", attack)
    assert all(answer.startswith("HTTP/1.1 200") for answer in outside.values()), outside
    inside = reach.inside("dials", attack, net=["*:80"])
    reached = {place.split()[0] for place, answer in inside.verdict.items() if answer.startswith("HTTP")}
    assert reached == {"api.good.example", "evil.example", *(set(PUBLIC) & set(targets(reach)))}
    assert {address for address, _ in reach.internet.reached()} <= {"11.0.0.10", "2a10:600d::10", *PUBLIC}
    assert inside.decisions(name="metadata.evil.example", verdict="denied", reason="metadata address")
    (warning,) = inside.result["warnings"]
    assert warning == 'net = "*:80": the program may reach any public host on port 80'


def test_the_widest_rule_for_addresses_means_public_ones(reach: Reach) -> None:
    """Whoever allows every address has not allowed the machine's own networks and its metadata service."""
    attack = [[address, 80, GET] for address in targets(reach)]
    public = {"11.0.0.66"} | ({"2a10:600d::66"} if reach.internet.ipv6 else set())
    inside = reach.inside("dials", attack, net=["0.0.0.0/0", "::/0"])
    reached = {target.split()[0] for target, answer in inside.verdict.items() if answer.startswith("HTTP")}
    assert reached == public, inside.verdict
    assert {address for address, _ in reach.internet.reached()} == public


def test_a_rule_for_one_address_is_one_for_its_other_spellings_and_nothing_else(reach: Reach) -> None:
    attack = [[address, 80, GET] for address in targets(reach)]
    inside = reach.inside("dials", attack, net=["10.0.0.5:80"])
    reached = {target.split()[0] for target, answer in inside.verdict.items() if answer.startswith("HTTP")}
    assert reached == {"10.0.0.5"} and {address for address, _ in reach.internet.reached()} == {"10.0.0.5"}


#: What a name leads to, in the order of the answer.
LEADS: dict[str, dict[str, Any]] = {
    "loopback": {"A": ["127.0.0.1"]},
    "loopback-other": {"A": ["127.8.8.8"]},
    "zero": {"A": ["0.0.0.0"]},
    "private": {"A": ["10.0.0.5"]},
    "metadata": {"A": ["169.254.169.254"]},
    "metadata-other": {"A": ["100.100.100.200"]},
    "loopback-six": {"AAAA": ["::1"]},
    "unspecified-six": {"AAAA": ["::"]},
    "mapped": {"AAAA": ["::ffff:169.254.169.254"]},
    "nat64": {"AAAA": ["64:ff9b::a9fe:a9fe"]},
    "sixtofour": {"AAAA": ["2002:a9fe:a9fe::1"]},
    "private-six": {"AAAA": ["fd00:dead::5"]},
    "metadata-six": {"AAAA": ["fd00:ec2::254"]},
    "by-alias": {"CNAME": "loopback.lead.example"},
    "both": {"A": ["127.0.0.1", "10.0.0.5"], "AAAA": ["::1"]},
}


def test_an_allowed_name_that_leads_to_the_machine_or_its_networks_is_refused(reach: Reach) -> None:
    reach.internet.zone(**{f"{name}.lead.example": {**records, "ttl": 0} for name, records in LEADS.items()})
    names = [f"{name}.lead.example" for name, records in LEADS.items()
             if reach.internet.ipv6 or "AAAA" not in records]  # fmt: skip
    attack = [[name, 80, GET.replace("api.good.example", name)] for name in names]
    outside = reach.outside("dials", attack)
    reached = {target.split()[0] for target, answer in outside.items() if answer.startswith("HTTP/1.1 200")}
    assert reached == set(names), outside
    inside = reach.inside("dials", attack, net=["*.lead.example"])
    assert reach.internet.reached() == set(), reach.internet.reached()
    refused = inside.decisions(verdict="denied")
    assert {one["name"] for one in refused} == set(names)
    assert all(one["reason"].endswith(" address") for one in refused), refused


@pytest.mark.parametrize(
    "records",
    [
        {"A": ["127.0.0.1", "11.0.0.66"]},
        {"A": ["169.254.169.254", "10.0.0.5", "11.0.0.66", "100.100.100.200"]},
        {"A": ["11.0.0.66"], "AAAA": ["::1"]},
        {"A": ["11.0.0.66"], "AAAA": ["::ffff:127.0.0.1", "fd00:dead::5"]},
    ],
)
def test_of_a_mixed_answer_only_the_public_address_is_dialled(reach: Reach, records: dict[str, Any]) -> None:
    need("AAAA" not in records or reach.internet.ipv6, "this kernel has no IPv6")
    reach.internet.zone(**{"mixed.lead.example": {**records, "ttl": 0}})
    # Port 9 refuses on the public address, so a client that tries the rest gets there.
    attack = [["mixed.lead.example", port, GET.replace("api.good", "mixed.lead")] for port in (80, 443, 9)]
    inside = reach.inside("dials", attack[:1], net=["mixed.lead.example:80,9"])
    assert inside.verdict["mixed.lead.example 80"].startswith("HTTP/1.1 200")
    reach.inside("dials", attack, net=["mixed.lead.example:80,443,9"])
    assert {address for address, _ in reach.internet.reached()} <= {"11.0.0.66"}


def test_an_answer_that_changes_between_two_questions_gains_nothing(reach: Reach) -> None:
    """The address that was checked is the one that is dialled, however often the answer changes."""
    turns = [["11.0.0.66"], ["127.0.0.1"]] * 40
    record = {"A": turns, "ttl": 0}
    name = "turning.lead.example"
    attack = [[name, port, GET.replace("api.good.example", name)] for port in (80, 8080)]
    reach.internet.zone(**{name: record})
    for _ in range(4):
        reach.outside("dials", attack)
        if "127.0.0.1" in {address for address, _ in reach.internet.reached()}:
            break
    else:
        pytest.fail("the control did not reach the machine itself")
    reach.internet.zone(**{name: record})
    seen = set()
    for _ in range(6):
        reach.inside("dials", attack, net=[f"{name}:80,8080"])
        seen |= {address for address, _ in reach.internet.reached()}
    assert seen == {"11.0.0.66"}


@pytest.mark.parametrize("name", ["missing.good.example", "api.good.example"])
def test_a_search_domain_of_the_host_makes_no_other_name_of_an_allowed_one(reach: Reach, name: str) -> None:
    """With `ndots`, as in a pod of Kubernetes, the C library asks for the longer name first."""
    options = "options timeout:2 attempts:1 ndots:5"
    reach.internet.write_etc("resolv.conf", f"nameserver {DNS}\nsearch evil.example\n{options}\n")
    attack = [[name, 80, GET.replace("api.good.example", name)]]
    assert reach.outside("dials", attack)[f"{name} 80"].startswith("HTTP/1.1 200")
    assert reach.internet.reached() == {("11.0.0.66", 80)}
    inside = reach.inside("dials", attack, net=["*.good.example"])
    assert reach.internet.asked() == {name}
    assert {address for address, _ in reach.internet.reached()} <= {"11.0.0.10", "2a10:600d::10"}
    if name.startswith("missing"):
        assert inside.decisions(verdict="failed")[0]["reason"] == "name not found"


def test_a_name_without_a_dot_is_completed_by_the_hosts_search_domains(reach: Reach) -> None:
    text = f"nameserver {DNS}\nsearch good.example\noptions timeout:2 attempts:1\n"
    reach.internet.write_etc("resolv.conf", text)
    inside = reach.inside("dials", [["api", 80, GET.replace("api.good.example", "api")]], net=["api:80"])
    assert inside.verdict["api 80"].startswith("HTTP/1.1 200")
    assert reach.internet.asked() == {"api.good.example"}


def test_a_redirect_to_the_metadata_service_leads_nowhere(reach: Reach) -> None:
    to = "http://169.254.169.254/latest/meta-data/"
    command = ["curl", "-sSL", "--max-time", "5", f"http://api.good.example/redirect?to={to}"]
    assert "credentials" in reach.internet.outside(command).stdout
    reach.internet.clear()
    result = reach.supervisor.run(command, ["api.good.example", "0.0.0.0/0"])
    assert "credentials" not in result["stdout"]
    assert "169.254.169.254" not in {address for address, _ in reach.internet.reached()}
    assert any(
        one["address"] == "169.254.169.254" and one["verdict"] == "denied" for one in result["network"]
    )
