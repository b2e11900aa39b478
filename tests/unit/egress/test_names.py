"""Synthetic addresses: each name has one of each family, and keeps it."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from stockade.egress.names import NAMES, SyntheticNames, is_synthetic


def test_both_families_of_a_name_stand_for_it() -> None:
    names = SyntheticNames()
    found = names.addresses("api.example.com")
    assert found == ("198.18.0.3", "fd00:5afe::3")
    assert {names.name_of(address) for address in found} == {"api.example.com"}
    assert names.addresses("b.example.com") == ("198.18.0.4", "fd00:5afe::4")
    assert names.addresses("api.example.com") == found


def test_every_name_up_to_the_bound_has_addresses_in_the_ranges_and_the_next_has_none() -> None:
    names = SyntheticNames()
    for number in range(NAMES):
        found = names.addresses(f"n{number}.example")
        assert found is not None
    assert ip_address(found[0]) in ip_network("198.18.0.0/15")
    assert ip_address(found[1]) in ip_network("fd00:5afe::/64")
    assert names.name_of(found[0]) == names.name_of(found[1]) == f"n{NAMES - 1}.example"
    assert names.addresses("one.more.example") is None
    assert names.addresses("n7.example") == ("198.18.0.10", "fd00:5afe::a")


def test_addresses_that_stand_for_no_name() -> None:
    names = SyntheticNames()
    names.addresses("a.example")
    for address in ("198.18.0.0", "198.18.0.1", "198.18.0.2", "fd00:5afe::", "fd00:5afe::1", "fd00:5afe::2"):
        assert names.name_of(address) is None
        assert is_synthetic(address)
    for address in ("198.18.0.4", "198.19.255.255", "fd00:5afe::4", "fd00:5afe::ffff:ffff:ffff:ffff"):
        assert names.name_of(address) is None
        assert is_synthetic(address)
    for address in ("198.17.255.255", "198.20.0.0", "fd00:5afe:0:1::", "127.0.0.1", "", "no address"):
        assert names.name_of(address) is None
        assert not is_synthetic(address)


def test_long_names_have_less_room() -> None:
    names = SyntheticNames(room=500)
    assert names.addresses("a" * 250) is not None
    assert names.addresses("b" * 250) is not None
    assert names.addresses("c") is None
    assert names.addresses("a" * 250) is not None
