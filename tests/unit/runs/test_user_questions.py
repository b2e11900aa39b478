"""Questions of an egress process, which a hostile one writes as it likes."""

from __future__ import annotations

import msgspec
import pytest

from stockade.runs.network.user_questions import _EgressQuestion

GOOD = {"id": 1, "name": "a.example", "port": 443, "at": 1.5, "inside": ["10.0.0.1", 4000, "10.0.0.2", 443]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": "soon"}, {"inside": ["10.0.0.1", 70000, "10.0.0.2", 443]}, {"port": "443"}, {"name": 1},
        {"inside": ["10.0.0.1", 4000, "10.0.0.2", -1]}, {"inside": ["10.0.0.1", 4000]}, {"id": None},
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused_before_anything_looks_at_it(wrong: dict[str, object]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(GOOD), type=_EgressQuestion).port == 443
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(msgspec.json.encode(GOOD | wrong), type=_EgressQuestion)
