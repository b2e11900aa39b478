"""Writes docs/reference/holdback.md from the table, so that the two cannot part.

python scripts/holdback_reference.py           write it
python scripts/holdback_reference.py --check   exit code 1 if it is stale
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stockade.policy.holdback_lookup import PACKAGES
from stockade.policy.holdback_table import BESIDE_SCRIPTS, CACHES, OBEYED, RUNS, ToolFile
from stockade.workspace.holdback.references import SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "holdback.md"

HEAD = """\
# What a commit holds back

Made by `scripts/holdback_reference.py` from `src/stockade/policy/holdback_table.py`. [Review and
commit changes](../how-to/review-changes.md) says how to commit, [the policy
reference](policy-protection.md#hold_back-allow_commit) how `hold_back` and `allow_commit` are written.

A program in a sandbox chooses every name and every byte of its changes. Three kinds of files are not like
others:

- **Obeyed unasked**: a tool of yours runs or obeys the file because it is there, or is bent by it to
  another interpreter, registry or wrapper. `stockade commit` holds these back until `--allow-exec-config`,
  `--allow PATTERN` or the policy's `allow_commit` says otherwise.
- **Runs at your next command**: code of the project that your next build, test or install runs. It is
  committed; `stockade diff` and `stockade commit` show it first, with the reason.
- **Compiled code in a cache**, such as `__pycache__`: left out of the commit, with one line for all of it.

What the policy's `protect` names is always held back. A repository (`.git`, `.hg`, `.sl`,
`.jj`) whose own list names a file that is held back stays with it, as a whole; `--allow .git` parts them (and
lets in nothing that git obeys: that takes a pattern such as `.git/modules`).

## What is removed

To remove `.npmrc` does as much as to empty it: npm runs scripts again that `ignore-scripts` kept from
running. So the removal of a file that is obeyed is held back as its change is: also by a rename, by a
directory in its place, by closing the directory that it lies in, and of a directory such as `.github` with
such files in it. What goes together with all that it governs is not: `rm -r app` takes `app/.npmrc` along.
Nor is what the table marks with *may go*: programs, environments and records of work under way, which
restrict nothing.

## What files of yours name

Some files that are obeyed name others, which are obeyed with them. The files of **your** tree are read for
that, never those that the program left, and what they name is held back with the name of the file that
does:

{sources}

Imports and sourced files are followed in turn, five deep. Looked at are the workspace (its 5,000
directories nearest to the top, without packages), the directories above it, and your home; `stockade diff`
looks only above the changes that it shows. A file of more than 256 KiB is not read, nor more than 500 files
or 5,000 names; then the commit says so. Not followed: what a script runs in turn, tools that a command
finds by name (`make`, `npm run`), patterns such as `@docs/*.md`, and documents that instructions only
mention.

## Compiled code in caches: left out

{caches}

Python runs `__pycache__/util.cpython-311.pyc` in place of `util.py` if the time and the size of the source
that it records are right, or if it says that nobody is to check. A program writes both as it likes, git
does not show the file, and nobody can read it. So no header is believed: what is in such a directory stays
behind, the commit says so in one line, and the workspace closes without it, because your Python makes it
again. `--allow '**/__pycache__'` (or `'**/*.pyc'`) takes it over; `--allow-exec-config` does not. Bytecode
anywhere else is in the table below: Python imports it where there is no source. Not covered is build output
of other tools (`target/`, `build/`, `dist/`, `_build/`, `.next/`, object files): a tool that trusts it by
its time runs it at your next build.

## How a pattern matches

Names count at any depth and in any case, and also in spellings that only some file systems take for the
same. A slash at the end stands for everything in a directory; `*` for a part of a name, `**` for any number
of names, `{a,b}` for either. The whole path counts, also above the workspace, up to
the top of a worktree of git's. A link counts also where a pattern only begins: a link `.github` leads to
other workflows.

- *capitals*: the file counts in these capitals only, unless the directory takes names of either case for
  the same. `docs/agents.md` is a document, `docs/AGENTS.md` is read by agents.
- *own files*: the file does not count inside of packages that the project uses: {packages}.
- *may go*: its removal is not held back.

Patterns of a policy and of `--allow` count from the top of the workspace, include everything below what
they name, and have `*` and `**`: `.venv`, `**/AGENTS.md`, `deploy/*.sh`. `hold_back` is compared in any
case, `allow_commit` exactly.

Files that only choose between versions of a tool (`.nvmrc`, `.java-version`) are in neither table.
The table is not complete: a tool that it does not name may run or obey a file all the same.
"""

#: What is looked for in each kind of file that names others.
HOW = {
    "imports": "imports (`@docs/rules.md`) in",
    "shell": "sourced files, scripts, directories of PATH and `use flake` in",
    "json": "commands, arguments and instructions in",
    "toml": "commands and environment files in",
    "yaml": "commands in",
}


def page() -> str:
    """The whole page."""
    packages = ", ".join(f"`{name}`" for name in sorted(PACKAGES))
    sources = "\n".join(
        f"- {HOW[kind]}: {', '.join(f'`{name}`' for name in names.split())}"
        for kind, names in SOURCES.items()
    )
    head = HEAD.replace("{packages}", packages).replace("{sources}", sources)
    lines = [head.replace("{caches}", "\n".join(_table(CACHES)))]
    lines += ["## Obeyed unasked: held back", "", *_table(OBEYED), ""]
    lines += ["## Runs at your next command: shown first", "", *_table(RUNS), ""]
    places = ", ".join(f"`{name}`" for name in BESIDE_SCRIPTS if name)
    lines += [
        "Modules that shadow Python's own are shown as well: a source, an extension module or a package,",
        "such as `random.py`, `random.so` or `json/__init__.py` at the top of the workspace, or in",
        f"{places}.",
        "Python imports it in whatever runs beside it. Modules that shadow packages which you have installed",
        "are not known to it.",
    ]
    return "\n".join(lines) + "\n"


def _table(entries: Sequence[ToolFile]) -> Iterator[str]:
    yield "| files | tool | what it does with them | counts | shown by |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        files = " ".join(f"`{pattern}`" for pattern in entry.patterns.split())
        marks = (("capitals", entry.exact), ("own files", entry.own), ("may go", entry.removable))
        counts = ", ".join(word for word, is_so in marks if is_so)
        yield f"| {files} | {entry.tool} | {entry.does} | {counts} | {entry.advisory} |"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is stale."""
    made = page()
    if "--check" in arguments:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made
        if stale:
            print(f"{PAGE.name} is stale: run `python scripts/holdback_reference.py`", file=sys.stderr)
        return int(stale)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
