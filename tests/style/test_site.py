"""`make docs` builds the documentation as a site, and a page that leads nowhere ends the build."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.means import need
from support.paths import ROOT

need(
    all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")),
    "the extra stockade[docs] is not installed",
)


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the site is made from."""
    root = tmp_path / "checkout"
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("*.md")):
        shutil.copy(path, root)
    (root / "src").symlink_to(ROOT / "src")
    return root


def test_the_site_is_built_and_takes_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="https?://[^"]*"', text) == []
    assert "<h2" in text and "stockade.Sandbox" in text


def test_a_page_that_leads_nowhere_ends_the_build(checkout: Path, tmp_path: Path) -> None:
    with (checkout / "docs" / "glossary.md").open("a") as page:
        page.write("\n[a page](nothing.md), [a heading](quickstart.md#nothing), [a file](../NOTHING.md)\n")
    done = built(checkout, tmp_path / "site")
    assert done.returncode != 0
    assert all(f"'{link}'" in done.stderr for link in ("nothing.md", "../NOTHING.md")), done.stderr
    assert "#nothing" in done.stderr


def test_a_name_that_the_package_does_not_have_ends_the_build(checkout: Path, tmp_path: Path) -> None:
    (checkout / "docs/reference/python/errors.md").write_text("# Errors\n\n::: stockade.Nothing\n")
    done = built(checkout, tmp_path / "site")
    assert done.returncode != 0 and "stockade.Nothing could not be found" in done.stderr
