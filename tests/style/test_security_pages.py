"""SECURITY.md stays short, and whatever it or anything else names of docs/security exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stockade.policy import Control
from support.paths import ROOT

SUMMARY = ROOT / "SECURITY.md"
PAGES = sorted(set((ROOT / "docs/security").glob("*.md")) - {ROOT / "docs/security/kernel-surface.md"})
LONGEST = 150
HEADINGS = ["Attacker", "Promise", "Mechanism", "Evidence", "Not promised"]
_MADE = re.compile(r'^<a id="np-(\d+)"></a>\*\*NP-(\d+)\. ', re.MULTILINE)
_NAMED = re.compile(r"\bNP-(\d+)\b")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def identifiers(page: Path) -> list[str]:
    """The ids of the non-promises that a page makes."""
    found = _MADE.findall(page.read_text(encoding="utf-8"))
    assert [anchor for anchor, shown in found if anchor != shown] == []
    return [anchor for anchor, _ in found]


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of SECURITY.md."""
    section = SUMMARY.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_security_md_is_read_in_ten_minutes() -> None:
    text = SUMMARY.read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST
    assert text.count("\n$ ") == 5, "five commands that check it"
    assert len(table("What is not promised")) == 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_five_headings(page: Path) -> None:
    assert re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) == HEADINGS


def test_every_page_is_listed() -> None:
    text = SUMMARY.read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"(docs/security/{page.name})" not in text] == []


def test_a_non_promise_has_an_id_of_its_own() -> None:
    made = [identifier for page in PAGES for identifier in identifiers(page)]
    assert len(made) > 100 and len(made) == len(set(made))


def test_every_non_promise_that_is_named_exists() -> None:
    made = {identifier for page in PAGES for identifier in identifiers(page)}
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in ("src", "tests", "scripts", "examples"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h", ".toml")]
    named = {path: _NAMED.findall(path.read_text(encoding="utf-8", errors="replace")) for path in texts}
    strange = {str(path): set(found) - made for path, found in named.items() if set(found) - made}
    assert strange == {} and named[SUMMARY]


def test_a_promise_leads_to_its_mechanism_code_and_test() -> None:
    rows = table("What is promised")
    assert len(rows) > 15
    for _, *cells in rows:
        for cell, place in zip(cells, ("docs/security/", "src/", "tests/"), strict=True):
            links = _LINK.findall(cell)
            assert links and all(link.startswith(place) and (ROOT / link).exists() for link in links), cell


def test_every_control_has_its_promise() -> None:
    text = (ROOT / "docs/security/controls.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == set(Control)
