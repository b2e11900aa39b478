"""The `stockade` command.

Each subcommand is a module with `main(argv) -> int` and `build_parser()`.
Only the module of the command in use is imported, so that `stockade run`
starts quickly.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

from stockade.errors import StockadeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

#: Every subcommand: its module, and its line in `stockade --help`.
COMMANDS = {
    "run": ("stockade.cli.run", "run a command behind every wall of the policy"),
    "shell": ("stockade.cli.shell", "start a shell behind every wall of the policy"),
    "pipe": ("stockade.cli.pipe", "run commands at once, each in its own sandbox, connected by pipes"),
    "attach": ("stockade.cli.attach", "return to a kept shell, or open another one beside it"),
    "init": ("stockade.cli.init", "write a policy for this project that lets its tests run"),
    "learn": ("stockade.cli.learn", "run a command and write the smallest policy that lets it pass"),
    "plan": ("stockade.cli.plan", "show what `run` would do, without doing it"),
    "explain": ("stockade.cli.explain", "say what a program may use, which wall decides, and what to change"),
    "ps": ("stockade.cli.ps", "list the living sandboxes"),
    "kill": ("stockade.cli.kill", "end sandboxes, whichever process started them"),
    "logs": ("stockade.cli.logs", "list what earlier runs did"),
    "diff": ("stockade.cli.diff", "show what a run changed in its workspace"),
    "commit": ("stockade.cli.commit", "apply a run's changes to your files"),
    "discard": ("stockade.cli.discard", "delete a run's changes"),
    "snapshot": ("stockade.cli.snapshot", "save the current state of a workspace"),
    "restore": ("stockade.cli.restore", "return a workspace to a snapshot"),
    "fork": ("stockade.cli.fork", "make workspaces that begin where another one is"),
    "merge": ("stockade.cli.merge", "merge the changes of other workspaces into one"),
    "workspaces": ("stockade.cli.workspaces", "list the kept changes, remove old ones"),
    "receipts": ("stockade.cli.receipts", "list, show and export the signed record of every run"),
    "verify": ("stockade.cli.verify", "check a receipt, or the whole record"),
    "keys": ("stockade.cli.keys", "show, export or rotate the key that signs receipts"),
    "agents": ("stockade.cli.agents", "list agents, and switch an agent's sandbox on or off"),
    "loop": ("stockade.cli.loop", "let a coding agent work on a list of items, each judged by your tests"),
    "serve": ("stockade.cli.serve", "serve sandboxes over HTTP, for the SDKs of OpenSandbox"),
    "mcp": ("stockade.cli.mcp", "serve sandboxed tools to agents over the Model Context Protocol"),
    "hook": ("stockade.cli.hook", "run the commands of an agent that itself stays outside"),
    "images": ("stockade.cli.images", "register root file systems for the server's sandboxes"),
    "doctor": ("stockade.cli.doctor", "show what this machine can enforce, and how to fix what it cannot"),
    "profiles": ("stockade.cli.profiles", "list the named starting points for a policy"),
    "policy": ("stockade.cli.policy", "check a policy file, or print the schema"),
    "trust": ("stockade.cli.trust", "let this project's own policy widen yours"),
    "demo": (
        "stockade.cli.demo.command",
        "watch an agent run into the walls, in a project made for the demo",
    ),
    "purge": ("stockade.cli.purge", "remove everything that Stockade keeps"),
    "completion": ("stockade.cli.completion", "print the completion script for a shell"),
    "man": ("stockade.cli.man", "print the manual page"),
    "bench": ("stockade.bench.command", "measure Stockade against its rivals on this machine"),
}

REFUSED = 125
#: How many new objects start a garbage collection: a start makes many objects, and hardly any garbage.
GARBAGE = 50_000


def shell_command() -> NoReturn:
    """Run a line for a shell as `stockade hook run` does: the entry point of stockade-shell."""
    sys.argv[1:1] = ["hook", "run"]
    command()


def command() -> NoReturn:
    """Run this process's command line and end the process: the entry point of the installed command.

    The kernel frees what is left. The interpreter's own teardown would take as long as starting a sandbox.
    """
    import atexit

    gc.set_threshold(GARBAGE)
    from stockade.cli.ui import quick_imports

    quick_imports.find_by_name()
    try:
        code = main()
    except SystemExit as end:  # argparse raises it
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # the interpreter's own code for this
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    from stockade.cli.ui import output  # after `command` has told the garbage collector to wait

    output.Verbosity.quiet = output.Verbosity.verbose = False
    try:
        _open_streams()
        try:
            if argv is None:
                return _dispatch(sys.argv[1:], own_process=True)
            return _dispatch(argv)
        finally:
            sys.stdout.flush()
    except StockadeError as error:
        output.error(error.message, hint=error.hint)
        return REFUSED
    except ModuleNotFoundError as error:
        if sys.platform == "linux":
            raise
        # Windows has no fcntl, and no backend that starts a sandbox.
        output.error(
            f"this command needs Python's module {error.name}, which this system does not have",
            hint="`stockade doctor` shows what works here",
        )
        return REFUSED
    except BrokenPipeError:
        # The reader has gone (`stockade doctor | head -1`): this is no failure, so print nothing.
        output.silence(1)
        return 141
    except OSError as error:
        # A full disk, a file that cannot be read: the exit code must not look like the command's own.
        output.error(output.reason(error), hint=output.advice(error))
        output.silence(1)
        return REFUSED


def _open_streams() -> None:
    """Open /dev/null in place of every closed standard stream.

    Otherwise a file that we open would get the stream's number, and receive what is written to the stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # The interpreter sets sys.stdout or sys.stderr to None if it found the descriptor closed, and print()
    # with file=None writes to stdout.
    sys.stdout = sys.stdout or os.fdopen(1, "w", errors="replace", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="replace", closefd=False)


def _dispatch(args: list[str], *, own_process: bool = False) -> int:
    if args[:1] == ["help"] and len(args) > 1:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        from stockade._version import __version__

        print(f"stockade {__version__}")
        return 0
    if args[0] not in COMMANDS:
        from stockade.cli.ui import output

        output.error(f"unknown command {args[0]!r}", hint=nearest_command(args[0], args[1:]))
        return 2
    from stockade.cli.ui import quick_imports

    quick_imports.load_msgspec()
    if own_process:
        from stockade.linux.user import Caller

        Caller.from_python = False
    module = importlib.import_module(COMMANDS[args[0]][0])
    return int(module.main(args[1:]))


def usage() -> str:
    """Return the text of `stockade --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return (
        "usage: stockade COMMAND ...\n\n"
        "Runs code you do not trust behind walls the kernel keeps.\n\n"
        + "\n".join(lines)
        + "\n\nexample: stockade run -- python3 untrusted.py\n"
        "`stockade COMMAND --help` shows the options of one command and an example."
    )


def nearest_command(word: str, rest: Sequence[str] = ()) -> str:
    """Return a hint: what to type instead of an unknown command."""
    import shlex
    import shutil

    from stockade.policy.suggestions import OTHER_COMMANDS, closest

    if shutil.which(word):
        return f"to run that program: stockade run -- {shlex.join([word, *rest])}"
    near = OTHER_COMMANDS.get(word) or closest(word, COMMANDS)
    return f"did you mean `stockade {near}`?" if near else "`stockade --help` lists the commands"
