"""Every file and module that a page or a comment names exists: a reader who follows a name arrives."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from rooms import ROOMS, modules

PACKAGE = ROOT / "src/stockade"
TOP = ("README", "SECURITY", "CONTRIBUTING", "SPECIFICATION", "CHANGELOG", "bench/README")
PAGES = [
    *(ROOT / f"{name}.md" for name in TOP),
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: The pages that explain the code by its classes.
EXPLANATIONS = ["architecture", "walls", "living-sandboxes", "workspaces"]
#: Files of the readers' own projects, and files that an explanation says there are none of.
EXAMPLES = frozenset(
    {
        *(
            "docs/rules.md",
            "docs/agents.md",
            "docs/AGENTS.md",
            "docs/conf.py",
            "docs/guide.md",
            "docs/source/conf.py",
            "src/main.c",
            "src/x.py",
            "src/x.test.js",
            "src/**/test_",
            "tests/a/b.py",
            "tests/test.sh",
            "stockade.pem",
        ),
        "src/stockade/gate/bin",  # made by an install
        *("linux/in.h", "linux/in6.h", "linux/netlink.h", "linux/sock_diag.h"),  # of the kernel
        *("backends/NAME.py", "state/directory.py", "host/detection.py", "gate/binary.py"),
    }
)

_FENCE = re.compile(r"^```(?!text).*?^```$", re.MULTILINE | re.DOTALL)
_FROM_THE_TOP = re.compile(r"(?<![\w./~*-])(?:src|tests|scripts|docs|\.ci)/[\w./*-]*\w")
_IN_A_ROOM = re.compile(rf"(?<![\w./~*-])(?:{'|'.join(ROOMS)})/[\w./*-]*\.(?:py|c|h)\b")
#: A name with a dash is no module's: an extension of the server, for example.
_DOTTED = re.compile(r"\bstockade(?:\.\w++)++(?!-)")
_IN_CODE = re.compile(r"`([^`\n]+)`")
#: A file of the gate, named alone; with a directory before it, another pattern finds it.
_OF_THE_GATE = re.compile(r"(?<![\w./<-])\w+\.[ch]\b(?!\()")
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def missing(text: str) -> Iterator[str]:
    """The names in a page that lead nowhere. Blocks that are typed or shown are left out: others run them."""
    text = _FENCE.sub("", text)
    named = [*_FROM_THE_TOP.findall(text), *_IN_A_ROOM.findall(text)]
    yield from (name for name in named if name not in EXAMPLES and not _exists(name))
    dotted = [name for code in _IN_CODE.findall(text) for name in _DOTTED.findall(code)]
    yield from (name for name in dotted if name not in EXAMPLES and not _leads_to_a_name(name.split(".")))


def _exists(name: str) -> bool:
    """Whether there is such a path in the project or, counted from there, in the package."""
    return any((top / name).exists() or ("*" in name and any(top.glob(name))) for top in (ROOT, PACKAGE))


def _leads_to_a_name(parts: list[str]) -> bool:
    """Whether a dotted name is a module, a name in one, or a file such as stockade.toml."""
    known = modules()
    if parts[1] in ("toml", "py"):
        return True
    at = max(end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in known)
    return at == len(parts) or parts[at] in _names_in(known[".".join(parts[:at])])


@lru_cache
def _names_in(module: Path) -> frozenset[str]:
    """What a module defines, imports or lists in `__all__`."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    listed = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    found |= {value for value in listed if isinstance(value, str)}
    return frozenset(found)


def comments(source: Path) -> str:
    """What a source file says to its readers: its comments, and in Python its docstrings."""
    text = source.read_text(encoding="utf-8")
    if source.suffix != ".py":
        return "\n".join(_C_COMMENT.findall(text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return "\n".join([*found, *(ast.get_docstring(node) or "" for node in nodes)])


def missing_of_the_gate(text: str) -> list[str]:
    """The C files that a text names alone and the gate does not have."""
    return [name for name in _OF_THE_GATE.findall(text) if not (PACKAGE / "gate/src" / name).exists()]


def test_what_a_comment_names_exists() -> None:
    sources = [*modules().values(), *sorted((PACKAGE / "gate/src").glob("*.[ch]"))]
    wrong = {}
    for source in sources:
        text = comments(source)
        if found := [*missing(text), *missing_of_the_gate(text)]:
            wrong[str(source.relative_to(ROOT))] = found
    assert wrong == {}


def test_contributing_names_files_of_the_gate_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert _OF_THE_GATE.findall(text) and missing_of_the_gate(text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert list(missing(page.read_text(encoding="utf-8"))) == []


def test_the_pages_that_the_package_names_exist() -> None:
    texts = (module.read_text(encoding="utf-8") for module in modules().values())
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w./-]+\.md\b", text)}
    assert named and [name for name in sorted(named - EXAMPLES) if not _exists(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "src/stockade/live/pool.py",
        "tests/functional/test_nothing.py",
        "scripts/nothing.py",
        "docs/nothing.md",
        "policy/load.py",
        "gate/src/nothing.c",
        "runs/no*.py",
        "stockade.live.pool",
        "stockade.sandbox.pool.Nothing",
    ],
)
def test_a_wrong_name_is_found(name: str) -> None:
    assert list(missing(f"See `{name}`.")) == [name]


def test_right_names_and_examples_are_left_alone() -> None:
    text = (
        "`src/stockade/sandbox/pool.py`, `policy/model.py`, `gate/src/plan.c`, `tests/style`,"
        " `docs/adr/*.md`, `stockade.sandbox.pool.Pool`, `stockade.run`, `stockade.toml`\n"
        "```sh\ncat docs/nothing.md\n```\n"
    )
    assert list(missing(text)) == []


@pytest.mark.parametrize("page", EXPLANATIONS)
def test_an_explanation_names_classes_that_exist(page: str) -> None:
    text = (ROOT / f"docs/explanation/{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.\w+\(\))?`", text))
    assert named, page
    assert named - classes() == set()


@lru_cache
def classes() -> frozenset[str]:
    """The names of the package's classes."""
    return frozenset(
        name
        for module in modules().values()
        for name in re.findall(r"^ *class (\w+)", module.read_text(encoding="utf-8"), re.MULTILINE)
    )
