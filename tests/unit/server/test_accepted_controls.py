"""`accept` of the server's configuration: controls that this machine may keep in part."""

from __future__ import annotations

import pytest

from stockade import PolicyError
from stockade.server.config import parse_config


def test_the_operator_names_controls() -> None:
    config = parse_config('accept = ["limits.memory", "limits.cpu"]', "serve.toml")
    assert config.accept == ("limits.memory", "limits.cpu")
    assert parse_config("", "serve.toml").accept == ()


@pytest.mark.parametrize("value", ['["limits.moon"]', '"limits.memory"', "[1]"])
def test_what_is_no_control_is_an_error_with_its_line(value: str) -> None:
    with pytest.raises(PolicyError, match=r"^serve.toml:2: accept"):
        parse_config(f"\naccept = {value}", "serve.toml")
