"""Which files the host's own instructions, hooks and environment files name, read within bounds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.policy import holdback_lookup
from stockade.workspace.holdback import references
from stockade.workspace.version_control.hook_paths import HookPaths

FILE = 0o100644


def named(tree: Path, *directories: str) -> HookPaths:
    return references.references(str(tree), [f"{tree}/{name}" for name in directories], str(tree / "no-home"))


def names(kind: str, text: str) -> set[str]:
    return {one.name for one in references.KINDS[kind](text)}


def test_every_file_that_is_read_is_one_that_is_held_back() -> None:
    for line in references.SOURCES.values():
        for name in line.split():
            assert holdback_lookup.obeyed(name, FILE, lambda path: False) is not None, name


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (
            "imports",
            "@a.md, (@b/c.md) **@d.md** `@e.md` - @~/f.md",
            {"a.md", "b/c.md", "d.md", "e.md", "~/f.md"},
        ),
        ("shell", "if test -e x; then source a; fi\nexport B=$(./b)", {"a", "./b"}),
        ("shell", 'source "$(git rev-parse --show-toplevel)/a" ${X}', {"a"}),
        ("shell", "PATH=bin:$PATH python3 -m x.y z.py", {"bin", "x/y.py", "x/y/__main__.py", "z.py"}),
        ("json", '{"hooks": ["${workspaceFolder}/a", {"x": "b/c"}], "y": "d/e"}', {"a", "b/c"}),
        ("json", '// c\n{"command": "http://x/\\"//y", /* z */ "args": ["a/b",],}', {"a/b"}),
        ("toml", '[env]\n_.path = ["bin", "{{config_root}}/b"]\nX = "c/d"', {"bin", "b"}),
        ("toml", '[mcp_servers.x]\ncommand = "a/b"\nargs = [\n "c/d",\n]\nmodel = "e/f"', {"a/b", "c/d"}),
        ("toml", '[hooks]\nenter = "./x.sh"', {"./x.sh"}),
        (
            "yaml",
            "entry: >-\n  a/b --c=d/e # f/g\nfiles: |\n  h/i\n  j/k\nargs: [l/m]",
            {"a/b", "d/e", "l/m"},
        ),
    ],
)
def test_the_names_in_a_file(kind: str, text: str, wanted: set[str]) -> None:
    assert wanted <= names(kind, text)
    assert (
        not {"pyproject.toml", ".pylintrc", "y", "d/e", "f/g", "h/i", "j/k", "e/f"}
        & names(kind, text) - wanted
    )


def test_imports_go_in_a_circle_and_no_deeper_than_five(tmp_path: Path) -> None:
    (tmp_path / "CLAUDE.md").write_text("@1.md @CLAUDE.md")
    for n in range(1, 9):
        (tmp_path / f"{n}.md").write_text(f"@{n + 1}.md @1.md")
    found = named(tmp_path)
    assert [n for n in range(1, 9) if found.why(f"{tmp_path}/{n}.md", link=False)] == [1, 2, 3, 4, 5, 6]


def test_names_that_lead_out_of_the_workspace_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "out.md").write_text("@tree/x.md")
    (tmp_path / "tree" / "CLAUDE.md").write_text(f"@../out.md @{tmp_path}/out.md @/etc/passwd @ok.md")
    found = named(tmp_path / "tree")
    assert not found.why(f"{tmp_path}/out.md", link=False) and not found.why(
        f"{tmp_path}/tree/x.md", link=False
    )
    assert found.why(f"{tmp_path}/tree/OK.md", link=False)


def test_a_link_in_between_counts_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "docs").symlink_to("real")
    (tmp_path / "CLAUDE.md").write_text("@docs/a.md")
    found = named(tmp_path)
    assert found.why(f"{tmp_path}/real/a.md", link=False) and found.why(f"{tmp_path}/docs", link=True)


def test_what_was_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "CLAUDE.md").write_bytes(b"@a.md " * 100_000)
    (tmp_path / "AGENTS.md").write_text(" ".join(f"@{n}.md" for n in range(10_000)))
    found = dict(sentence.split(": ", 1) for sentence in named(tmp_path).unread)
    assert "too large" in found[f"{tmp_path}/CLAUDE.md"]
    assert "too many files" in found[f"{tmp_path}/AGENTS.md"]


def test_pipes_devices_and_directories_in_their_place_are_passed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "CLAUDE.md")
    (tmp_path / "AGENTS.md").symlink_to("/dev/zero")
    (tmp_path / ".envrc").mkdir()
    (tmp_path / "GEMINI.md").symlink_to("GEMINI.md")
    assert named(tmp_path) == HookPaths()


@pytest.mark.parametrize("kind", references.KINDS)
@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 120_000, "/*" * 120_000, "{" * 250_000, '{"a":' * 40_000, "[" * 250_000, "$(" * 120_000,
        "a." * 120_000 + "=1", "@" * 250_000, " -m" * 80_000, " " * 250_000, "-" * 250_000, "\n" * 250_000,
        "- " * 120_000, "'" * 250_000, "${" * 120_000, "a" * 250_000 + ":", ", " * 120_000, "@a" * 120_000,
    ],
    ids=lambda text: text[:6],
)  # fmt: skip
def test_hostile_text_takes_no_longer(kind: str, text: str) -> None:
    start = time.process_time()
    for _, _ in zip(range(references.MOST_NAMES), references.KINDS[kind](text), strict=False):
        pass
    assert time.process_time() - start < 1


@given(
    st.binary(max_size=400),
    st.sampled_from([name for line in references.SOURCES.values() for name in line.split()]),
)
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    tree = tmp_path_factory.mktemp("tree")
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_bytes(data)
    found = named(tree)
    assert all(lead.path.startswith(f"{tree}/") for lead in found.leads)


def test_five_thousand_names_and_as_many_directories_take_seconds_at_most(tmp_path: Path) -> None:
    places = [f"d{n}" for n in range(references.MOST_PLACES)]
    for place in places:
        (tmp_path / place).mkdir()
    (tmp_path / "CLAUDE.md").write_text(" ".join(f"@a/b/c/d/{n}.md" for n in range(4000)))
    start = time.process_time()
    found = named(tmp_path, *places)
    assert time.process_time() - start < 3 and found.why(f"{tmp_path}/a/b/c/d/3999.md", link=False)
    assert any(sentence.startswith(f"{tmp_path}: too many directories") for sentence in found.unread)
