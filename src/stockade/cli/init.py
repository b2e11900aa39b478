"""`stockade init`: a policy for the project one is in, with which its tests run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from typing import NamedTuple

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.project import Kind, kinds, place
from stockade.errors import NotFoundError, PolicyError
from stockade.policy import Caller
from stockade.policy.load import NAMES, read_project
from stockade.policy.profile import profile
from stockade.policy.values import literal, render

#: Files in which projects keep secrets that no test should need.
SECRET = (
    ".env",
    ".env.local",
    ".env.production",
    ".netrc",
    ".npmrc",
    ".pypirc",
    "secrets",
    "credentials.json",
)
WALL = "15m"


class Draft(NamedTuple):
    """What was found, and what follows from it."""

    kind: Kind | None
    others: tuple[Kind, ...]
    #: What the default profile does not show and its programs need, and where these are looked for.
    read: tuple[str, ...]
    path: tuple[str, ...]
    missing: tuple[str, ...]
    secret: tuple[str, ...]

    @property
    def widens(self) -> bool:
        """Whether the policy asks for more than the default one, so that it has to be trusted."""
        return bool(self.read)

    @property
    def command(self) -> str:
        words = self.kind.command if self.kind is not None else ()
        return shlex.join(words) if words else "COMMAND"


def main(argv: list[str]) -> int:
    """Look, write, and say what to type next."""
    args = parser().parse_args(argv)
    directory = os.path.realpath(args.directory)
    if not os.path.isdir(directory):
        raise NotFoundError(f"{args.directory} is not a directory")
    draft = _draft(directory)
    text = written(draft)
    if args.print:
        print(text, end="")
        return 0
    _write(directory, text, force=args.force)
    for line in _next(draft, directory):
        output.say(line)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade init",
        description="Look at a project and write a stockade.toml with which its tests run: commented, and\n"
        "as narrow as that allows. Nothing of the project is run.",
        epilog="examples:\n  stockade init\n  stockade init --print ~/project",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "directory", nargs="?", default=".", metavar="PATH", help="the project (default: this directory)"
    )
    made.add_argument("--print", action="store_true", help="print the policy and write nothing")
    made.add_argument("--force", action="store_true", help="replace a stockade.toml that is there")
    return output.with_manners(made)


def _draft(directory: str) -> Draft:
    found = kinds(directory)
    kind = found[0] if found else None
    read: list[str] = []
    path: list[str] = []
    missing = []
    for tool in kind.tools if kind is not None else ():
        where = place(tool, directory)
        if not where:
            missing.append(tool)
        elif "/" not in tool and not where.startswith((*_shown(), f"{directory}/")):
            # Under both names: programs of one install look for each other where they were found. What a
            # tool of the project's own leads to is no grant of ours: a run judges it as a toolchain.
            named = shutil.which(tool) or where
            read += [_tree(one) for one in (named, where) if not one.startswith(_shown())]
            path.append(os.path.dirname(named))
    if read and kind is not None:
        read += kind.caches
    secret = tuple(name for name in SECRET if os.path.lexists(os.path.join(directory, name)))
    return Draft(
        kind, tuple(found[1:]), tuple(dict.fromkeys(read)), tuple(dict.fromkeys(path)), tuple(missing), secret
    )


def _shown() -> tuple[str, ...]:
    """What the default profile shows, each with the slash that ends it."""
    return tuple(f"{path.removesuffix('?')}/" for path in profile("strict").system)


def written(draft: Draft) -> str:
    """The policy file."""
    kind = draft.kind
    what = f"{kind.language}, {kind.manager}" if kind is not None else "a project of no kind that is known"
    lines = [
        f"# What commands of this project may see, change and use: {what}.",
        "#",
        f"#     stockade run --discard -- {draft.command}",
        "#",
    ]
    if kind is not None and kind.install:
        lines += [f"# There is no network inside: install outside first ({kind.install}).", "#"]
    lines += [f"# Also here: {one.language}, {one.manager}: {_words(one)}" for one in draft.others]
    lines += [
        "# The project's directory is a copy inside: what a command changes there is kept aside. Everything",
        "# else of yours is hidden. `stockade policy check` says what follows from this file.",
        "",
        *_files(draft),
        *_environment(draft),
        "[workspace]",
        'path = "."                 # the directory of this file',
        '# mode = "ro"              # nothing in it can be changed',
        "",
        "[limits]",
        f'wall = "{WALL}"              # then everything is ended',
        '# memory = "2G"            # of all processes together; needs cgroups, `stockade doctor` says how',
        "# tasks = 256              # processes and threads",
    ]
    return "\n".join(lines) + "\n"


def _words(kind: Kind) -> str:
    return shlex.join(kind.command) if kind.command else "no tests were found"


def _files(draft: Draft) -> list[str]:
    lines = []
    if draft.read:
        lines += [
            "# Where its tools are: not the system's, so this file counts after `stockade trust`.",
            f"read = [{', '.join(map(render, draft.read))}]",
            "",
        ]
    if draft.secret:
        lines += [
            "# Hidden: no test should need it.",
            f"deny = [{', '.join(render(f'./{name}') for name in draft.secret)}]",
            "",
        ]
    lines += [
        *(
            ['# read = ["/srv/data"]     # more to see, read-only; asks for `stockade trust`']
            * (not draft.read)
        ),
        '# net = "open"             # the host\'s network, all of it; asks for `stockade trust`',
        "",
    ]
    return lines


def _tree(program: str) -> str:
    """What to show of a program's install: as the profile `dev` does if it knows it, else by itself."""
    home = Caller.current().home
    for known in profile("dev").read:
        shown = known.removesuffix("?").replace("~", home, 1)
        if known != "/opt?" and program.startswith(f"{shown}/"):
            return known.removesuffix("?")
    top = os.path.dirname(program)
    above = os.path.dirname(top)
    whole = os.path.basename(top) == "bin" and above not in ("/", home, "/opt", "/usr/local")
    return literal(above if whole else top)


def _environment(draft: Draft) -> list[str]:
    env = dict(draft.kind.env) if draft.kind is not None else {}
    if draft.path:
        env["PATH"] = ":".join((*draft.path, profile("strict").env["PATH"]))
    if not env:
        return ['# env = { CI = "1" }       # your own environment is not passed in', ""]
    return [
        "# Your own environment is not passed in.",
        "[env]",
        *(f"{name} = {render(value)}" for name, value in env.items()),
        "",
    ]


def _write(directory: str, text: str, *, force: bool) -> None:
    path = os.path.join(directory, NAMES[0])
    known = None if force else read_project(directory)
    if known is not None:
        raise PolicyError(
            f"there is a policy already: {known.path}", hint="`stockade init --force` replaces stockade.toml"
        )
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with open(path, "w", encoding="utf-8", opener=lambda name, _: os.open(name, flags, 0o644)) as file:
            file.write(text)
    except FileExistsError:
        raise PolicyError(f"{path} is there already", hint="`stockade init --force` replaces it") from None


def _next(draft: Draft, directory: str) -> list[str]:
    kind = draft.kind
    name = output.name(os.path.join(directory, NAMES[0]))
    lines = [f"{name} is written: {f'{kind.language}, {kind.manager}' if kind else 'no kind is known'}"]
    if kind is not None and not kind.command:
        lines.append("no tests were found; what you run is up to you")
    lines += [f"{tool} is not installed here, or not in your PATH" for tool in draft.missing]
    if draft.widens:
        lines.append("it shows tools that the default policy hides; read it, and if you agree:")
        lines.append(f"  stockade trust {shlex.quote(name)}")
    lines.append(f"next: stockade run --discard -- {draft.command}")
    return lines
