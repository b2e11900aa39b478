"""Keys of clients, and names and origins that requests may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockade.errors import PolicyError
from stockade.server.config import ServerConfig
from stockade.server.front.authentication import ClientKeys, OriginCheck
from stockade.server.wire.errors import ApiError


def _headers(**fields: str) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}


def test_a_key_is_kept_as_a_digest_that_only_the_owner_reads(tmp_path: Path) -> None:
    home = str(tmp_path / "state")
    keys = ClientKeys(home, {})
    assert keys.empty
    key = keys.add("one")
    file = tmp_path / "state" / "server" / "keys.json"
    assert key not in file.read_text() and os.stat(file).st_mode & 0o777 == 0o600
    assert keys.owner_of(key.encode()) == "one" and keys.owner_of(b"other") is None


def test_a_new_key_of_a_client_ends_the_earlier_one(tmp_path: Path) -> None:
    keys, other = ClientKeys(str(tmp_path / "state"), {}), ClientKeys(str(tmp_path / "state"), {})
    assert not keys.has("one")
    first, second = keys.add("one"), other.add("one")
    assert keys.has("one") and not keys.has("two")
    assert keys.owner_of(first.encode()) is None
    assert keys.owner_of(second.encode()) == "one"


def test_the_variable_sets_the_first_clients_key(tmp_path: Path) -> None:
    keys = ClientKeys(str(tmp_path / "state"), {"STOCKADE_API_KEY": "k" * 20})
    assert keys.owner_of(b"k" * 20) == "default"
    with pytest.raises(PolicyError):
        ClientKeys(str(tmp_path / "state"), {"STOCKADE_API_KEY": "short"})


def test_a_client_has_a_plain_name(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        ClientKeys(str(tmp_path / "state"), {}).add("../x")


@pytest.mark.parametrize(
    ("config", "host", "allowed"),
    [
        (ServerConfig(), "localhost:8080", True),
        (ServerConfig(), "127.0.0.5", True),
        (ServerConfig(), "[::1]:8080", True),
        (ServerConfig(), "192.168.1.2", False),
        (ServerConfig(), "rebound.example.org", False),
        (ServerConfig(), "", False),
        (ServerConfig(hosts=("box.example.com",)), "BOX.example.com:8080", True),
        (ServerConfig(listen="0.0.0.0:8080"), "192.168.1.2:8080", True),
        (ServerConfig(listen="0.0.0.0:8080"), "rebound.example.org", False),
    ],
)
def test_a_name_that_an_attacker_can_choose_is_refused(
    config: ServerConfig, host: str, allowed: bool
) -> None:
    check = OriginCheck(config)
    if allowed:
        check.check(_headers(host=host))
    else:
        with pytest.raises(ApiError) as caught:
            check.check(_headers(host=host))
        assert caught.value.status == 403
