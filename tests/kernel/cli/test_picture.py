"""The picture of the demo in the README: drawn from what the command really prints, and not stale."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from xml.etree import ElementTree

import pytest

from support.paths import ROOT

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "scripts" / "picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def structure(svg: str) -> list[str]:
    """Every title in the picture, in order; numbers and places are another machine's."""
    texts = ElementTree.fromstring(svg).iter(f"{SPACE}text")
    return [re.sub(r"\d+", "0", one.text or "") for one in texts if one.get("font-weight") == "bold"]


def test_the_picture_shows_what_the_demo_shows_now(picture: ModuleType) -> None:
    drawn = picture.svg(picture.capture(picture.COMMAND), "stockade demo")
    kept = picture.PICTURE.read_text(encoding="utf-8")
    assert structure(kept) == structure(drawn), "run `python scripts/picture.py` and look at docs/demo.svg"
    assert len(structure(kept)) > 10


def test_every_character_of_a_terminal_finds_its_place(picture: ModuleType) -> None:
    text = "\x1b[1mbold\x1b[0m & <b>\n\n  \x1b[31m  red\x1b[0m"
    root = ElementTree.fromstring(picture.svg(text, "a & b"))
    found = [(one.text, one.get("x"), one.get("fill")) for one in root.iter(f"{SPACE}text")]
    cell, margin = picture.CELL, picture.MARGIN
    assert found == [
        ("bold", f"{margin:.1f}", None),
        ("& <b>", f"{margin + 5 * cell:.1f}", None),
        ("red", f"{margin + 4 * cell:.1f}", picture.COLOURS["31"]),
    ]
    assert root.findtext(f"{SPACE}title") == "a & b"


def test_a_sequence_that_is_no_colour_is_refused(picture: ModuleType) -> None:
    with pytest.raises(ValueError, match="not only colours"):
        picture.svg("\x1b[2Jgone", "x")


def test_a_command_that_fails_draws_nothing(picture: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ended with 1"):
        picture.capture(["/bin/false"])
