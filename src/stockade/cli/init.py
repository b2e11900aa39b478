"""`stockade init`: write a policy for a project that lets its tests run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.project_kinds import ProjectKind, kinds, place
from stockade.errors import NotFoundError, PolicyError, StockadeError
from stockade.integrations import settings_files
from stockade.linux.user import Caller
from stockade.policy.profile import profile
from stockade.policy.toml import SECTION
from stockade.policy.values import literal, render
from stockade.resolve.config_files import NAMES
from stockade.resolve.discovery import discover, read_project
from stockade.state import state_dir

#: Files in which projects keep secrets that no test should need. These at any depth, even if created later,
DEEP = (".env", ".env.*local", ".env.production", ".env.staging")
#: and these only at the top, if they exist: deeper down they may be a package, or test data.
SECRET = (".netrc", ".npmrc", ".pypirc", "secrets", "credentials.json")
WALL = "15m"


class PolicyDraft(NamedTuple):
    """What `stockade init` found in a project, and what its policy will contain."""

    kind: ProjectKind | None
    others: tuple[ProjectKind, ...]
    #: What its programs need beyond the default profile, and the PATH entries that lead to them.
    read: tuple[str, ...]
    path: tuple[str, ...]
    missing: tuple[str, ...]
    secret: tuple[str, ...]

    @property
    def widens(self) -> bool:
        """Whether the policy asks for more than the default one, so that the user must trust it."""
        return bool(self.read)

    @property
    def command(self) -> str:
        words = self.kind.command if self.kind is not None else ()
        return shlex.join(words) if words else "COMMAND"


def main(argv: list[str]) -> int:
    """Inspect the project, write the policy, and say what to type next."""
    args = build_parser().parse_args(argv)
    directory = os.path.realpath(args.directory)
    if not os.path.isdir(directory):
        raise NotFoundError(f"{args.directory} is not a directory")
    draft = _draft(directory)
    text = policy_text(draft)
    if args.print:
        print(output.clean(text) if sys.stdout.isatty() else text, end="")
        return 0
    _write(directory, text, force=args.force)
    _trust(directory)
    for line in _next(draft, directory):
        output.say(line)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade init",
        description="Inspect a project and write a commented stockade.toml, as narrow as its tests allow.\n"
        "Nothing of the project is run.",
        epilog="examples:\n  stockade init\n  stockade init --print ~/project",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", nargs="?", default=".", metavar="PATH", help="the project (default: this directory)"
    )
    parser.add_argument("--print", action="store_true", help="print the policy without writing it")
    parser.add_argument("--force", action="store_true", help="replace an existing stockade.toml")
    return output.add_verbosity(parser)


def _draft(directory: str) -> PolicyDraft:
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
            # Show both names: programs of one install look for each other under either. A tool inside the
            # project gets no grant here: a run judges what it leads to as a toolchain.
            named = shutil.which(tool) or where
            read += [_tree(one) for one in (named, where) if not one.startswith(_shown())]
            path.append(os.path.dirname(named))
    if read and kind is not None:
        read += kind.caches
    secret = secrets_in(directory)
    return PolicyDraft(
        kind, tuple(found[1:]), tuple(dict.fromkeys(read)), tuple(dict.fromkeys(path)), tuple(missing), secret
    )


def _shown() -> tuple[str, ...]:
    """Return the directories that the default profile shows, each with a trailing slash."""
    return tuple(f"{path.removesuffix('?')}/" for path in profile("strict").system)


def policy_text(draft: PolicyDraft) -> str:
    """Return the text of the policy file."""
    kind = draft.kind
    what = f"{kind.language}, {kind.manager}" if kind is not None else "an unknown kind of project"
    lines = [
        f"# What commands in this project may see, change and use: {what}.",
        "#",
        f"#     stockade run --discard -- {draft.command}",
        "#",
    ]
    if kind is not None and kind.install:
        lines += [f"# The sandbox has no network: install dependencies first, outside ({kind.install}).", "#"]
    lines += [f"# Also here: {one.language}, {one.manager}: {_words(one)}" for one in draft.others]
    lines += [
        "# Commands see the project's directory as an overlay: their changes are kept aside. All your other",
        "# files are hidden. `stockade policy check` shows what this file enforces.",
        "",
        *_files(draft),
        *_environment(draft),
        "[workspace]",
        'path = "."                 # the directory of this file; commands start where you are in it',
        '# mode = "ro"              # commands cannot change anything in it',
        "",
        "[limits]",
        f'wall = "{WALL}"              # then Stockade ends everything',
        '# memory = "2G"            # for all processes together; needs cgroups, see `stockade doctor`',
        "# tasks = 256              # processes and threads",
    ]
    return "\n".join(lines) + "\n"


def _words(kind: ProjectKind) -> str:
    return shlex.join(kind.command) if kind.command else "no tests were found"


def _files(draft: PolicyDraft) -> list[str]:
    lines = []
    if draft.read:
        lines += [
            "# The project's tools lie outside the system's directories: this file needs `stockade trust`.",
            f"read = [{', '.join(map(render, draft.read))}]",
            "",
        ]
    hidden = hidden_in_projects(draft.secret)
    lines += [
        "# Hidden: no test should need it. ** means any depth, ? means it may be missing.",
        f"deny = [{', '.join(map(render, hidden))}]",
        "",
    ]
    lines += [
        *(['# read = ["/srv/data"]     # show more, read-only; needs `stockade trust`'] * (not draft.read)),
        '# net = ["api.example.com:443"]   # hosts to reach; needs `stockade trust`',
        "",
    ]
    return lines


def hidden_in_projects(secret: Sequence[str]) -> list[str]:
    """Return what to hide in a project; `secret` are the names of `SECRET` that it has."""
    # A name is hidden whether it exists or not; a pattern hides what matches when a run begins.
    return [*(f"./{name}" for name in secret), "./.env", *(f"**/{name}?" for name in DEEP)]


def secrets_in(directory: str) -> tuple[str, ...]:
    """Return the names of `SECRET` that a project has at its top."""
    return tuple(name for name in SECRET if os.path.lexists(os.path.join(directory, name)))


def _tree(program: str) -> str:
    """Return the directory to show for a program: as the profile `dev` has it, or else its own install."""
    home = Caller.current().home
    for known in profile("dev").read:
        shown = known.removesuffix("?").replace("~", home, 1)
        if known != "/opt?" and program.startswith(f"{shown}/"):
            return known.removesuffix("?")
    top = os.path.dirname(program)
    above = os.path.dirname(top)
    whole = os.path.basename(top) == "bin" and above not in ("/", home, "/opt", "/usr/local")
    return literal(above if whole else top)


def _environment(draft: PolicyDraft) -> list[str]:
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
    _refuse_second(directory, force=force)
    if force and os.path.lexists(path):
        if os.path.islink(path) or not os.path.isfile(path):
            raise PolicyError(f"{path} is not a regular file", hint="remove it first")
        settings_files.write(path, text)
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PolicyError(f"{path} exists already", hint="`stockade init --force` replaces it") from None
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise PolicyError(f"cannot write {path}: {error.strerror}") from error


def _trust(directory: str) -> None:
    """Trust the new file if it stays within the user's own policy.

    The user has asked for it, and trust lets it apply in every directory of the project.
    """
    from stockade.resolve import trust

    caller = Caller.current()
    with contextlib.suppress(StockadeError, OSError):
        discover(directory, caller.environ, caller.home, workspace=directory)
        project = read_project(directory, only=NAMES[0])
        assert project is not None
        found = project.lookups(caller.home, caller.cwd, caller.environ)
        trust.record(project, found, state_dir(caller.environ, caller.home))


def _refuse_second(directory: str, *, force: bool) -> None:
    """Refuse to replace a policy without `force`, and to add one beside a pyproject.toml that has one."""
    second = os.path.join(directory, NAMES[1])
    if read_project(directory, only=NAMES[1]) is not None:
        raise PolicyError(
            f"the project has a policy already: [{'.'.join(SECTION)}] in {second}",
            hint="edit that one; `stockade init --print` prints a policy to copy from",
        )
    if not force and (known := read_project(directory, only=NAMES[0])) is not None:
        raise PolicyError(
            f"the project has a policy already: {known.path}", hint="`stockade init --force` replaces it"
        )


def _next(draft: PolicyDraft, directory: str) -> list[str]:
    kind = draft.kind
    name = output.name(os.path.join(directory, NAMES[0]))
    what = f"{kind.language}, {kind.manager}" if kind else "an unknown kind of project"
    lines = [f"wrote {name}: {what}"]
    if kind is not None and not kind.command:
        lines.append("found no tests; replace COMMAND with what you want to run")
    lines += [f"{tool} is not installed here, or not in your PATH" for tool in draft.missing]
    if draft.widens:
        lines.append("the policy shows tools that the default policy hides; read it, and if you agree:")
        lines.append(f"  stockade trust {shlex.quote(name)}")
    lines.append(f"next: stockade run --discard -- {draft.command}")
    return lines
