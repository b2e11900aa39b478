"""Writes docs/reference/holdback.md and holdback-references.md from the tables, so that pages and code agree.

python scripts/holdback_reference.py           write them
python scripts/holdback_reference.py --check   exit code 1 if one is stale
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stockade.policy.holdback_lookup import PACKAGES
from stockade.policy.holdback_table import BESIDE_SCRIPTS, CACHES, OBEYED, RUNS, ToolFile
from stockade.workspace.holdback.reference_sources import NOT_FOLLOWED, SOURCES
from stockade.workspace.holdback.references import EVALUATED

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

HEAD = """\
# What a commit holds back

`scripts/holdback_reference.py` makes this page from `src/stockade/policy/holdback_table.py`. [Review and
commit changes](../how-to/review-changes.md) says how to commit, [the policy
reference](policy-protection.md#hold_back-allow_commit) how to write `hold_back` and `allow_commit`.

A program in a sandbox chooses every name and every byte of its changes. A commit treats three kinds of
files specially:

- **Obeyed unasked**: one of your tools runs or obeys the file because it exists, or uses another
  interpreter, registry or wrapper because of it. `stockade commit` holds it back until you type
  `--allow-exec-config` or `--allow PATTERN`, or write `allow_commit` in the policy.
- **Runs at your next command**: code of the project that your next build, test or install runs. The commit
  applies it; `stockade diff` and `stockade commit` show it first, with the reason.
- **Compiled code in a cache**, such as `__pycache__`: the commit leaves it out, and says so in one line.

A commit always holds back what the policy's `protect` names. If the list of a repository (`.git`, `.hg`,
`.sl`, `.jj`) names a file that is held back, the commit holds back the whole repository too. `--allow .git`
commits the repository alone, without the files in it that git obeys: those need a pattern such as
`.git/modules`.

## Removed files

Removing `.npmrc` has the same effect as emptying it: npm again runs scripts that `ignore-scripts`
prevented. So a commit holds back the removal of an obeyed file as it holds back a change. A rename, a
directory in the file's place, and a closed directory around it count as removals, and so does the removal
of a directory such as `.github` with such files in it. The commit does not hold back a removal together
with everything that the file governs: `rm -r app` removes `app/.npmrc` too. Nor does it hold back the
removal of files that the table marks with *may go*: programs, environments and records of work in
progress, which restrict nothing.

## What files of yours name

Some obeyed files name other files, which are then obeyed too: `CLAUDE.md` imports `@docs/rules.md`, `.envrc`
evaluates `devbox.json`. A commit holds those back as well: see [Files that your files
name](holdback-references.md).

## Compiled code in caches: left out

{caches}

Python runs `__pycache__/util.cpython-311.pyc` in place of `util.py` if the file records the source's time
and size, or says that Python need not check them. A program can write both, git does not show the file, and
you cannot read it. So Stockade trusts no header: the commit leaves everything in such a directory out, says
so in one line, and closes the workspace without it. Your Python makes the files again. `--allow
'**/__pycache__'` (or `'**/*.pyc'`) commits them; `--allow-exec-config` does not. Bytecode elsewhere is in
the table below, because Python imports it where there is no source. This does not cover the build output of
other tools (`target/`, `build/`, `dist/`, `_build/`, `.next/`, object files): a tool that goes by the time
of such a file runs it at your next build.

## How a pattern matches

A pattern matches a name at any depth, in any case, and in spellings that some file systems take for the
same name. A slash at the end means everything in a directory, `*` a part of a name, `**` any number of
names, `{a,b}` either of two. Stockade compares the whole path, also above the workspace, up to the top of a
git worktree. A link also matches if its path is only the beginning of a pattern: a link `.github` leads to
other workflows.

- *capitals*: the file counts only in these capitals, unless the directory ignores case. `docs/agents.md` is
  a document; agents read `docs/AGENTS.md`.
- *own files*: the file does not count inside packages that the project uses: {packages}.
- *may go*: a commit does not hold back its removal.

Patterns of a policy and of `--allow` start at the top of the workspace, include everything below what they
name, and may contain `*` and `**`: `.venv`, `**/AGENTS.md`, `deploy/*.sh`. Stockade compares `hold_back`
in any case and `allow_commit` exactly.

Files that only choose between versions of a tool (`.nvmrc`, `.java-version`) are in neither table. The
table is not complete: a tool that it does not name may still run or obey a file.
"""

REFERENCES = """\
# Files that your files name

`scripts/holdback_reference.py` makes this page from `src/stockade/workspace/holdback/reference_sources.py`.

Some files that [your tools obey](holdback.md) name other files, which are then obeyed too. Stockade reads
the files of **your** tree for such names, never those that the program left. It holds back what they name,
and says which file names it:

{sources}

A command of a shell also names the files that its program evaluates: with `use devbox` or `eval "$(devbox
shellenv)"` in an `.envrc`, direnv runs what `devbox.json` says at your next `cd`. Stockade knows the files
of {evaluated}.

Stockade follows imports, sourced files, and what these programs evaluate in turn, five deep. It looks at
the workspace (the 5,000 directories nearest to its top, without packages), the directories above it, and
your home; `stockade diff` looks only above the changes that it shows. It reads no file of more than 1 MiB,
and at most 1,000 files and 10,000 names; if there are more, the commit says so. It does not follow what a
script runs in turn, tools that a command finds by name in a hook of git or of an agent (`make`, `npm run`),
patterns such as `@docs/*.md`, or documents that instructions only mention.

It does not read the files of these tools for names:

{unread}
"""

#: What is looked for in each kind of file that names others.
HOW = {
    "imports": "imports (`@docs/rules.md`) in",
    "shell": "sourced files, scripts, directories of PATH and what is evaluated, as in `use flake`, in",
    "hook": "scripts and sourced files in",
    "json": "commands, arguments and instructions in",
    "toml": "commands and environment files in",
    "yaml": "commands in",
    "pipeline": "included definitions (`uses: ./ci/x`, `include`, `template`), but not scripts, in",
    "words": "everything that looks like a path in",
}


def references_page() -> str:
    """The page about files that name others."""
    sources = "\n".join(
        f"- {HOW[kind]}: {', '.join(f'`{name}`' for name in names.split())}"
        for kind, names in SOURCES.items()
    )
    evaluated = ", ".join(f"`{name}`" for name in sorted(EVALUATED))
    page = REFERENCES.replace("{sources}", sources).replace("{evaluated}", evaluated)
    return page.replace("{unread}", "\n".join(_unread()))


def table_page() -> str:
    """The page with the table."""
    head = HEAD.replace("{packages}", ", ".join(f"`{name}`" for name in sorted(PACKAGES)))
    lines = [head.replace("{caches}", "\n".join(_table(CACHES)))]
    lines += ["## Obeyed unasked: held back", "", *_table(OBEYED), ""]
    lines += ["## Runs at your next command: shown first", "", *_table(RUNS), ""]
    places = ", ".join(f"`{name}`" for name in BESIDE_SCRIPTS if name)
    lines += [
        "Modules that shadow Python's own are shown as well: a source, an extension module or a package,",
        "such as `random.py`, `random.so` or `json/__init__.py` at the top of the workspace, or in",
        f"{places}.",
        "Every program that runs beside such a module imports it. Stockade does not know modules that shadow",
        "packages which you have installed.",
    ]
    return "\n".join(lines) + "\n"


def _unread() -> Iterator[str]:
    """The files that are not read for names, by reason."""
    reasons: dict[str, list[str]] = {}
    for pattern, reason in NOT_FOLLOWED.items():
        reasons.setdefault(reason, []).append(f"`{pattern}`")
    yield from (f"- {', '.join(patterns)}: {reason}" for reason, patterns in reasons.items())


def _table(entries: Sequence[ToolFile]) -> Iterator[str]:
    yield "| files | tool | what it does with them | counts | shown by |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        files = " ".join(f"`{pattern}`" for pattern in entry.patterns.split())
        marks = (("capitals", entry.exact), ("own files", entry.own), ("may go", entry.removable))
        counts = ", ".join(word for word, is_so in marks if is_so)
        yield f"| {files} | {entry.tool} | {entry.does} | {counts} | {entry.advisory} |"


def main(arguments: list[str]) -> int:
    """Write the pages, or say whether they are stale."""
    stale = False
    for name, text in (("holdback.md", table_page()), ("holdback-references.md", references_page())):
        page = REFERENCE / name
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            print(f"{name} is stale: run `python scripts/holdback_reference.py`", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
