"""What `make docs` needs besides mkdocs.yml: the project's own pages, their links, and doctests as code.

mkdocs only knows pages in docs/. SECURITY.md and its neighbours lie beside it, where people look for them.
The build adds them to the site, and turns a link to a file into a link to the page that is made from it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
POLICIES = ROOT / "src" / "stockade" / "loop" / "recipes" / "policies"
#: Pages beside docs/ and the agents' policies, and where the site has them.
PROJECT = {
    ROOT / "SECURITY.md": "project/security.md",
    ROOT / "SPECIFICATION.md": "project/specification.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "CHANGELOG.md": "project/changelog.md",
    **{path: f"how-to/agents/{path.name}" for path in sorted(POLICIES.glob("*.toml"))},
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the project's own pages."""
    for path, place in PROJECT.items():
        files.append(File.generated(config, place, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let every link between files lead to the page of the site."""
    place = page.file.src_uri
    sources = {name: path for path, name in PROJECT.items()}
    return with_site_links(markdown, sources.get(place, DOCS / place), place)


def with_site_links(text: str, source: Path, place: str) -> str:
    """Return the text of a source file with the links that a page at `place` needs."""

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[2]))
        if target in PROJECT:
            name = PROJECT[target]
        elif target.is_relative_to(DOCS):
            name = target.relative_to(DOCS).as_posix()
        elif target.exists() and target.is_relative_to(ROOT):
            return f"`{target.relative_to(ROOT)}`"  # the site has no sources
        else:
            return match[0]
        return f"[{match[1]}]({os.path.relpath(name, os.path.dirname(place) or '.')}{match[3] or ''})"

    return _LINK.sub(link, text)


class Doctests(Extension):  # type: ignore[misc]
    """Shows the examples of docstrings as code: in Markdown `>>>` is a quotation."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Put a fence around each example."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = _DOCTEST.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
