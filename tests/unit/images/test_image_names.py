"""The names of images, and of their directories."""

from __future__ import annotations

import pytest

from stockade.errors import PolicyError
from stockade.images.names import directory_name


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        ("tools", "tools"),
        ("python:3.12-slim", "python%3A3.12-slim"),
        ("registry.example.org:5000/team/base:1", "registry.example.org%3A5000%2Fteam%2Fbase%3A1"),
    ],
)
def test_a_name_is_one_component_of_a_path(name: str, directory: str) -> None:
    assert directory_name(name) == directory


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/..", "a/../b", "/a", "a/", "a//b", "A", "a b", "a\0", "ä", "%41", "host"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="not a name for an image"):
        directory_name(name)
