"""The variable from which `stockade.inputs` knows which name has which descriptor."""

from __future__ import annotations

import pytest

from stockade.inside.inputs import VARIABLE, Inputs, encode


def test_names_and_numbers_are_pairs_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encode({"data": 3, "code": 0}) == "data:3,code:0"
    monkeypatch.setenv(VARIABLE, "data:3,code:0")
    inputs = Inputs()
    assert list(inputs) == ["data", "code"] and len(inputs) == 2 and "other" not in inputs
    with pytest.raises(KeyError):
        inputs["other"]


def test_without_the_variable_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert dict(Inputs()) == {} and repr(Inputs()) == "<inputs none>"
