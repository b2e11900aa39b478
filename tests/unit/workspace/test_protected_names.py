"""Which changes touch a protected name, looked up among any number of them."""

from __future__ import annotations

import pytest

from stockade.workspace.holdback.protected_names import ProtectedNames

NAMES = ProtectedNames([".git/hooks", "Config", "a/b/c"])


@pytest.mark.parametrize(
    ("path", "goes", "touched"),
    [
        (".git/hooks", False, ".git/hooks"),
        (".git/hooks/pre-commit", False, ".git/hooks"),
        (".GIT/Hooks/x", False, ".git/hooks"),
        ("config", False, "Config"),
        ("a/b", False, None),
        ("a/b", True, "a/b/c"),
        ("a", True, "a/b/c"),
        ("a/b/cd", True, None),
        ("configs", True, None),
        (".git", False, None),
        ("other", True, None),
    ],
)
def test_a_change_touches_what_it_names_what_is_in_it_and_what_goes_with_it(
    path: str, goes: bool, touched: str | None
) -> None:
    assert NAMES.touched(path, goes=goes) == touched


def test_a_dot_protects_the_whole_workspace() -> None:
    assert ProtectedNames(["."]).touched("a/b", goes=False) == "."
    assert ProtectedNames([]).touched("a/b", goes=True) is None
