"""What a face says if the package that it is for is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from stockade.integrations import needs_extra

SOURCES = Path(__file__).parents[3]


def test_a_missing_module_names_the_extra_that_has_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("jupyter"):
        import no_such_module_at_all  # type: ignore[import-not-found] # noqa: F401
    assert caught.value.__notes__ == ["hint: pip install 'stockade[jupyter]'"]


def test_every_extra_that_a_face_names_exists() -> None:
    known = tomllib.loads((SOURCES / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        line.partition('("')[2].partition('")')[0]
        for path in (SOURCES / "src/stockade/integrations").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith('with needs_extra("')
    ]
    assert len(named) >= 6 and set(named) <= set(known)
