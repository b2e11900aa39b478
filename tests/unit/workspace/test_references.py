"""Which files the host's own instructions, hooks and environment files name, read within bounds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.policy import holdback_lookup
from stockade.policy.holdback_table import OBEYED, ToolFile
from stockade.workspace.holdback import references
from stockade.workspace.holdback.reference_sources import NOT_FOLLOWED, SOURCES
from stockade.workspace.version_control.hook_paths import HookPaths

FILE = 0o100644


def named(tree: Path, *directories: str) -> HookPaths:
    return references.references(str(tree), [f"{tree}/{name}" for name in directories], str(tree / "no-home"))


def names(kind: str, text: str) -> set[str]:
    return {one.name for one in references.KINDS[kind](text)}


#: The files that are read, with a name in place of each star.
READ = [
    pattern.replace("*", "x")
    for patterns in SOURCES.values()
    for pattern in holdback_lookup.expanded(patterns.split())
]


def entry_of(name: str) -> ToolFile | None:
    return holdback_lookup.obeyed(name, FILE, lambda path: False)


def test_every_file_that_is_read_is_one_that_is_held_back() -> None:
    assert [name for name in READ if entry_of(name) is None] == []


def test_the_files_of_every_tool_are_followed_or_there_is_a_reason() -> None:
    tools = {entry.patterns.split()[0] for entry in OBEYED}
    followed = {entry.patterns.split()[0] for name in READ if (entry := entry_of(name)) is not None}
    undecided = tools - followed - {*NOT_FOLLOWED}
    assert not undecided, "add a file to SOURCES, or a reason to NOT_FOLLOWED"
    assert not followed & {*NOT_FOLLOWED}, "followed, and yet there is a reason why not"
    assert {*NOT_FOLLOWED} <= tools, "no entry of the table begins so"
    assert len(tools) == len(OBEYED), "an entry is known by its first pattern"


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
        (
            "shell",
            '[ -s ./a ] && \\. "./a"\nbuiltin . ./b\nexec ./c\nenv -i X=1 ./d',
            {"./a", "./b", "./c", "./d"},
        ),
        ("shell", "f() { source ./a; }\nfunction g { . ./b; }\ntimeout -k 1 5s ./c", {"./a", "./b", "./c"}),
        ("shell", "direnv_load ./a\nsource_up b\nuse_flake ./c", {"./a", "../b", "../../b", "./c/flake.nix"}),
        ("shell", "use flake path:./a\nuse flake .?dir=b", {"./a/flake.nix", "b/flake.nix"}),
        ("shell", 'eval "$(make -C a env)"\nnpm --prefix b run c', {"a/Makefile", "b/package.json"}),
        ("shell", "export $(grep -v '^#' a | xargs)\neval $(cat b/c)\neval \"$(<d)\"", {"a", "b/c", "d"}),
        (
            "shell",
            "while read x; do export $x; done < a.list\nfor f in b/*.sh; do . $f; done",
            {"a.list", "b"},
        ),
        ("json", '{"hooks": "a/b", ' + '"x": [' * 9999, {"a/b"}),
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


@pytest.mark.parametrize(
    ("source", "text", "path"),
    [
        (".envrc", 'eval "$(devbox generate direnv --print-envrc)"', "devbox.json"),
        (".envrc", 'eval "$(devbox shellenv --config sub/env)"', "sub/env/devbox.json"),
        (".envrc", "use devbox", "devbox.lock"),
        (".envrc", "use guix", "guix.scm"),
        (".envrc", "use guix --manifest=etc/manifest.scm", "etc/manifest.scm"),
        (".envrc", "eval $(guix shell -m etc/dev.scm --search-paths)", "etc/dev.scm"),
        (".envrc", "use pixi", "pixi.toml"),
        (".envrc", 'eval "$(pixi shell-hook)"', "pyproject.toml"),
        (
            ".envrc",
            'watch_file pixi.lock\neval "$(pixi shell-hook --manifest-path a/pixi.toml)"',
            "a/pixi.toml",
        ),
        (".envrc", "use nix", "shell.nix"),
        (".envrc", "use nix nix/dev.nix", "nix/dev.nix"),
        (".envrc", "use flake ./dev#shell", "dev/flake.nix"),
        (".envrc", "layout pipenv", "Pipfile"),
        (".envrc", "layout poetry", "pyproject.toml"),
        (".envrc", 'eval "$(make env)"', "Makefile"),
        (".envrc.local", "source_env env.d/x", "env.d/x"),
        (".bashrc", ". tools/env.sh", "tools/env.sh"),
        (".husky/pre-commit", "node tools/check.js", "tools/check.js"),
        (".git/hooks/pre-push", "#!/bin/sh\n./tools/check.sh\n", "tools/check.sh"),
        (".vscode/tasks.json", '{"tasks": [{"command": "${workspaceFolder}/tools/x.sh"}]}', "tools/x.sh"),
        (".vscode/settings.json", '{"python.defaultInterpreterPath": "tools/python"}', "tools/python"),
        ("a.code-workspace", '{"settings": {"eslint.nodePath": "tools/node"}}', "tools/node"),
        (".zed/settings.json", '{"lsp": {"a": {"binary": {"path": "tools/lsp"}}}}', "tools/lsp"),
        (".helix/languages.toml", '[language-server.a]\ncommand = "tools/lsp"', "tools/lsp"),
        (".idea/watcherTasks.xml", '<option value="$PROJECT_DIR$/tools/x.sh" />', "tools/x.sh"),
        (".vimrc", "source tools/x.vim", "tools/x.vim"),
        (".dir-locals.el", '((nil . ((eval . (load "./tools/x.el")))))', "tools/x.el"),
        (".cursor/rules/a.mdc", "@docs/rules.md", "docs/rules.md"),
        (".claude/commands/a.md", "Do as @docs/rules.md says", "docs/rules.md"),
        (".clinerules", "@docs/rules.md", "docs/rules.md"),
        (".aider.conf.yml", "read: [docs/rules.md]\ntest-cmd: tools/x.sh", "docs/rules.md"),
        (".amazonq/cli-agents/a.json", '{"hooks": {"start": [{"command": "tools/x.sh"}]}}', "tools/x.sh"),
        (".github/workflows/a.yml", "jobs:\n  a:\n    steps:\n    - uses: ./ci/act", "ci/act/index.js"),
        (".gitlab-ci.yml", "include:\n  - local: /ci/a.yml\n", "ci/a.yml"),
        (".gitlab-ci.yml", "include: '/ci/a.yml'\n", "ci/a.yml"),
        ("azure-pipelines.yml", "steps:\n- template: ci/a.yml\n", "ci/a.yml"),
        ("Jenkinsfile", "load 'ci/a.groovy'", "ci/a.groovy"),
        (".lintstagedrc", '{"*.py": "tools/x.sh --fix"}', "tools/x.sh"),
        ("captainhook.json", '{"pre-commit": {"actions": [{"action": "tools/x.sh"}]}}', "tools/x.sh"),
        (".cargo/config.toml", '[build]\nrustc-wrapper = "tools/x.sh"', "tools/x.sh"),
        (".bazelrc", "import %workspace%/tools/x.rc", "tools/x.rc"),
        (".yarnrc.yml", "yarnPath: tools/yarn.cjs", "tools/yarn.cjs"),
        (".npmrc", "script-shell=./tools/sh", "tools/sh"),
        ("bunfig.toml", 'preload = ["./tools/x.ts"]', "tools/x.ts"),
        (".mvn/jvm.config", "-javaagent:tools/x.jar", "tools/x.jar"),
        (".rspec", "--require ./tools/x.rb", "tools/x.rb"),
        (".gdbinit", "source tools/x.py", "tools/x.py"),
        ("invoke.yaml", "run:\n  shell: tools/sh\n", "tools/sh"),
        (".actrc", "--secret-file tools/x.env", "tools/x.env"),
        ("ansible.cfg", "[defaults]\nvault_password_file = tools/x.sh", "tools/x.sh"),
        ("compose.override.yml", "services:\n  a:\n    env_file: tools/x.env", "tools/x.env"),
        ("rust-toolchain.toml", '[toolchain]\npath = "tools/rust"', "tools/rust"),
    ],
)
def test_what_a_file_of_each_tool_names(tmp_path: Path, source: str, text: str, path: str) -> None:
    (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / source).write_text(text)
    why = named(tmp_path).why(f"{tmp_path}/{path}", link=False)
    assert why.startswith(f"{source} names it: "), why


def test_a_file_as_windows_writes_it_is_read(tmp_path: Path) -> None:
    (tmp_path / ".mcp.json").write_text('{"command": "tools/serve"}', "utf-8-sig")
    assert named(tmp_path).why(f"{tmp_path}/tools/serve", link=False)


def test_a_hook_may_read_files_of_the_project() -> None:
    assert names("hook", "export N=$(grep -c x package.json)\ncat README.md") == set()


def test_what_an_environment_evaluates_is_followed_in_turn(tmp_path: Path) -> None:
    (tmp_path / ".envrc").write_text("use devbox\nuse flake\neval $(pixi shell-hook)")
    (tmp_path / "devbox.json").write_text(
        '{"shell": {"init_hook": ["./tools/hook.sh"]}, "packages": ["a/b"]}'
    )
    (tmp_path / "flake.nix").write_text("outputs = import ./nix/shell.nix // (import ./more);")
    (tmp_path / "nix").mkdir()
    (tmp_path / "nix" / "shell.nix").write_text("callPackage ./tool.nix { }")
    (tmp_path / "pixi.toml").write_text('[activation]\nscripts = ["tools/env.sh"]\n[tasks]\na = "src/a.py"')
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ninclude = ["src/a.py"]\n[tool.pixi.activation]\nscripts = ["tools/more.sh"]\n'
    )
    found = named(tmp_path)
    for path in (
        "tools/hook.sh",
        "nix/shell.nix",
        "nix/tool.nix",
        "more/default.nix",
        "tools/env.sh",
        "tools/more.sh",
    ):
        assert found.why(f"{tmp_path}/{path}", link=False), path
    for path in ("a/b", "src/a.py"):
        assert not found.why(f"{tmp_path}/{path}", link=False), path


def test_what_a_tool_only_mentions_is_not_held_back(tmp_path: Path) -> None:
    for source, text in {
        ".vscode/settings.json": '{"files.exclude": {"src/a.py": true}, "cSpell.words": ["src/a.py"]}',
        ".vscode/launch.json": '{"configurations": [{"program": "src/a.py"}]}',
        ".idea/workspace.xml": '<entry file="file://$PROJECT_DIR$/src/a.py">',
        ".github/workflows/a.yml": "- run: pytest src/a.py\n- uses: a/b@v4\n  with:\n    path: src/a.py",
        "CODEOWNERS": "src/a.py @ada",
        ".cursorignore": "src/a.py",
        ".husky/pre-push": "npm test\nmake -f src/a.py",
        ".git/hooks/pre-commit.sample": ". src/a.py",
    }.items():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text(text)
    assert named(tmp_path).why(f"{tmp_path}/src/a.py", link=False) == ""


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


def test_a_path_in_the_home_is_none_in_the_project(tmp_path: Path) -> None:
    home, tree = tmp_path / "home", tmp_path / "home" / "project"
    tree.mkdir(parents=True)
    (home / ".profile").write_text('PATH="$HOME/bin:$PATH"\n. $HOME/project/env.sh\n. "${HOME}/env"')
    found = references.references(str(tree), [], str(home))
    assert {lead.path for lead in found.leads} == {f"{tree}/env.sh"}


def test_what_was_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_bytes(b"@a.md " * 200_000)
    (tmp_path / "CLAUDE.md").write_text(" ".join(f"@{n}.md" for n in range(references.MOST_NAMES + 1)))
    found = dict(sentence.split(": ", 1) for sentence in named(tmp_path).unread)
    assert "too large" in found[f"{tmp_path}/AGENTS.md"]
    assert "too many files" in found[f"{tmp_path}/CLAUDE.md"]


def test_a_name_counts_once_in_files_side_by_side(tmp_path: Path) -> None:
    """Every desktop entry repeats the types of files that it opens."""
    entries = tmp_path / "home/.local/share/applications"
    entries.mkdir(parents=True)
    for number in range(30):
        types = ";".join(f"application/x-{kind}" for kind in range(references.MOST_NAMES // 20))
        (entries / f"{number}.desktop").write_text(f"[Desktop Entry]\nMimeType={types};\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    assert references.references(str(tree), [], str(tmp_path / "home")).unread == ()


def test_the_last_word_of_a_long_file_counts(tmp_path: Path) -> None:
    (tmp_path / ".vimrc").write_text(
        "\n".join(f"set x{n}.y" for n in range(2_000)) + "\nsource tools/last.vim"
    )
    assert named(tmp_path).why(f"{tmp_path}/tools/last.vim", link=False)


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
    st.sampled_from(READ),
)
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    tree = tmp_path_factory.mktemp("tree")
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
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
