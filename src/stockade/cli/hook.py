"""`stockade hook`: the agent stays outside, its commands run behind the walls."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator

from stockade.cli import run
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.own_command import own_command
from stockade.errors import PolicyError, StockadeError, unmade_sandbox

#: Options of `stockade hook claude` that are not options of the policy.
OWN = ("--allow", "--install", "--project", "--yes", "-v", "--verbose", "-q", "--quiet")
#: Seconds that a command waits for another one of the same workspace.
PATIENCE = 10.0
#: How the user learns why there is no sandbox.
UNMADE = "the user types `stockade run -- true` in this directory, with the options of the hook: it says why"
#: The exit code that makes Claude Code stop a call.
BLOCK = 2

EPILOG = """examples:
  stockade hook claude --install              show the entry for Claude Code's settings, and ask
  stockade hook claude --install --yes -p ~/claude.toml
  stockade hook run -- 'make check'           run a command as the hook does

The commands of a project continue in one workspace: `stockade diff` shows what they changed. As
CLAUDE_CODE_SHELL_PREFIX, the program stockade-shell does the same without a hook."""


def main(argv: list[str]) -> int:
    """Answer a call, install the hook, or run a command as the hook does."""
    if argv[:1] == ["claude"] and not {"--install", "-h", "--help"} & set(argv):
        return _answer(argv[1:])
    args = (parser := build_parser()).parse_args(argv)
    if args.action is None:
        parser.error("say what to do: claude or run")
    args.json = False
    if args.action == "run":
        return run_command(args)
    return _install(args, argv[1:])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade hook",
        description="Run the commands of an agent that itself stays outside: as a hook of Claude Code.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="claude | run")
    claude = actions.add_parser(
        "claude",
        help="answer Claude Code's PreToolUse hook, or install it",
        description="Read a call of Claude Code's PreToolUse hook on stdin, and answer with a command that\n"
        "runs behind the policy. A call that cannot be judged is denied.",
        epilog="example: stockade hook claude --install -p ~/claude.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_policy_options(claude)
    add = claude.add_argument
    add("--allow", action="store_true", help="let Claude Code run commands without asking: the walls decide")
    add("--install", action="store_true", help="show the entry for the settings and, if you agree, write it")
    add("--project", action="store_true", help="with --install: this project's settings instead of yours")
    add("--yes", action="store_true", help="with --install: write it without asking")
    output.add_verbosity(claude)
    inside = actions.add_parser(
        "run",
        help="run a command as the hook does",
        description="Run one line for a shell behind the policy, in this directory's workspace. Commands\n"
        "take turns; one that waits too long runs on a copy, whose changes are deleted at its end.",
        epilog="example: stockade hook run -- 'make check'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without --explain: what it finds refused tells which files the host has, and an agent reads it.
    run.add_options(inside, "hook")
    inside.add_argument("--copy", action="store_true", help="run on a copy of the workspace at once")
    return output.add_verbosity(parser)


def _answer(words: list[str]) -> int:
    """Answer a call. Whatever goes wrong here stops it: a failed hook must not let a command through."""
    from stockade.integrations import claude_hook

    try:
        args = build_parser().parse_args(["claude", *words])
        data = sys.stdin.buffer.read(claude_hook.LARGEST + 1)
        found = claude_hook.answer(data, runner(words), allow=args.allow)
        if found is not None:
            sys.stdout.buffer.write(output.as_json(found))
            sys.stdout.buffer.flush()
        return 0
    except BaseException as error:
        # The parser has printed what is wrong with an option.
        reason = "" if isinstance(error, SystemExit) else f": {error!r}"
        with contextlib.suppress(OSError):
            output.error(f"the hook failed, so the command was not run{reason}")
        return BLOCK


def runner(words: list[str]) -> list[str]:
    """Return the words that run a command as the hook's options say."""
    return [*own_command(absolute=True), "hook", "run", *policy_words(words)]


def policy_words(words: list[str]) -> list[str]:
    """Return the options of the policy among those of `stockade hook claude`."""
    return [word for word in words if word not in OWN]


def _install(args: argparse.Namespace, words: list[str]) -> int:
    from stockade.cli.ui.settings_change import offer
    from stockade.integrations import claude_hook, settings_files
    from stockade.linux.user import Caller

    caller = Caller.current()
    if args.policy is not None and not os.path.isabs(args.policy):
        raise PolicyError(
            f"-p {args.policy}: the hook runs in other directories",
            hint=f"write -p {os.path.abspath(args.policy)}",
        )
    quiet = argparse.Namespace(**{**vars(args), "json": True, "quiet": True})
    run.discover_policy(quiet, *run.user_and_state())  # a mistake must not end up in the settings
    allow = ["--allow"] if args.allow else []
    command = [*own_command(absolute=True), "hook", "claude", *policy_words(words), *allow]
    path = os.path.join(caller.cwd if args.project else caller.home, ".claude", "settings.json")
    entry = claude_hook.settings_entry(command)
    shown = settings_files.json_text({"hooks": {"PreToolUse": [entry]}})
    text = settings_files.with_json_item(path, ("hooks", "PreToolUse"), entry)
    return offer(path, shown, text, write=args.yes, option="--yes")


def run_command(args: argparse.Namespace) -> int:
    """Run a line for a shell in the workspace of this directory."""
    words = run.command(args)
    if len(words) != 1:
        raise PolicyError(
            "the command must be one word, as a shell has it", hint="quote it: stockade hook run -- 'ls -l'"
        )
    # What this run prints is what the agent reads.
    args.for_model = True
    try:
        return _run_in_workspace(args, [[shell, "-c", words[0]] for shell in ("bash", "sh")])
    except StockadeError as error:
        if error.result is not None:  # the command has run
            raise
        raise unmade_sandbox(UNMADE) from error


def _run_in_workspace(args: argparse.Namespace, commands: list[list[str]]) -> int:
    quiet = argparse.Namespace(**{**vars(args), "quiet": True})
    caller, home = run.user_and_state()
    policy = run.discover_policy(quiet, caller, home).policy
    if policy.workspace is None or policy.workspace.mode != "overlay" or args.workspace is not None:
        return run.run(args, lambda: commands)
    from stockade.cli.ui.start_directory import workspace_root

    root = workspace_root(policy, caller)
    with _turn(root, 0.0 if args.copy else PATIENCE) as mine:
        found = _workspace_of(root, free=not args.copy and mine)
        if args.copy or not mine:
            why = "" if args.copy else f"other commands here have run for {PATIENCE:.0f} seconds; "
            output.say(f"{why}this command runs on a copy, and its changes are deleted at its end")
            found, args.on_exit = _copy(found), "discard"
        if found:
            # The user hears of the workspace when it begins.
            args.workspace, args.brief = f"@{found}", True
        return run.run(args, lambda: commands)


@contextlib.contextmanager
def _turn(root: str, patience: float) -> Iterator[bool]:
    """Wait until no other command uses the workspace of a directory; yield whether that became true.

    The lock is on the directory itself, on the host: no program inside can take it.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + patience
        while not (mine := _locked(descriptor)) and time.monotonic() < until:
            time.sleep(0.02)
        yield mine
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _workspace_of(root: str, *, free: bool) -> str:
    """Return the id of the workspace of a directory that changed last; "" if it has none.

    A `free` one is used by no sandbox, such as a kept shell of the user's. Those of a loop's attempts are
    left out: a judge may have rejected what is in them.
    """
    from stockade.sandbox.workspace import Workspace

    ours = [one for one in Workspace.list() if one.path == root]
    if ours:
        from stockade.loop.record import attempt_workspaces

        attempts = attempt_workspaces(root)
        ours = [one for one in ours if one.id not in attempts]
    return next((one.id for one in ours if not free or not one.in_use()), "")


def _copy(id: str) -> str:
    """Return the id of a copy of a workspace; "" if there is nothing that can be copied now."""
    from stockade.sandbox.workspace import Workspace

    if not id:
        return ""
    try:
        (copy,) = Workspace.open(id).fork()
    except StockadeError:
        output.say("the changes of earlier commands are in use, and this command does not see them")
        return ""
    return copy.id
