"""The `stockade` command.

Each subcommand is a module with `main(argv) -> int` that builds its own
parser; only the module that was asked for is imported, so that
`stockade run` starts quickly.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from stockade.cli import output
from stockade.errors import StockadeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn

#: Every subcommand: the module that serves it and its line in `stockade --help`.
COMMANDS = {
    "run": ("stockade.cli.run", "run a command behind every wall of the policy"),
    "shell": ("stockade.cli.shell", "a shell behind every wall of the policy"),
    "attach": ("stockade.cli.attach", "come back to a shell that was kept, or open another beside it"),
    "init": ("stockade.cli.init", "write a policy for this project, with which its tests run"),
    "plan": ("stockade.cli.plan", "show what `run` would do, without doing it"),
    "ps": ("stockade.cli.ps", "list the sandboxes that live now"),
    "kill": ("stockade.cli.kill", "end sandboxes, whoever started them"),
    "logs": ("stockade.cli.logs", "list what earlier runs did"),
    "diff": ("stockade.cli.diff", "show what a run changed in its workspace"),
    "commit": ("stockade.cli.commit", "take a run's changes over into your files"),
    "discard": ("stockade.cli.discard", "forget a run's changes"),
    "snapshot": ("stockade.cli.snapshot", "keep a workspace as it is now, to come back to"),
    "restore": ("stockade.cli.restore", "put a workspace back as it was at a snapshot"),
    "fork": ("stockade.cli.fork", "make workspaces that begin where another is"),
    "merge": ("stockade.cli.merge", "take the changes of other workspaces over into one"),
    "workspaces": ("stockade.cli.workspaces", "list the changes that are kept aside, remove old ones"),
    "receipts": ("stockade.cli.receipts", "list, show and export the signed record of every run"),
    "verify": ("stockade.cli.verify", "check a receipt, or the whole record"),
    "keys": ("stockade.cli.keys", "show, export or rotate the key that signs receipts"),
    "agents": ("stockade.cli.agents", "list agents, and switch the sandbox of one on or off"),
    "doctor": ("stockade.cli.doctor", "show what this machine can enforce, and how to fix what it cannot"),
    "profiles": ("stockade.cli.profiles", "list the named starting points for a policy"),
    "policy": ("stockade.cli.policy", "check a policy file, or print the schema"),
    "trust": ("stockade.cli.trust", "let this project's own policy widen yours"),
    "demo": ("stockade.cli.demo", "watch an agent run into the walls, on a project made for it"),
    "purge": ("stockade.cli.purge", "remove everything that Stockade keeps"),
    "completion": ("stockade.cli.completion", "print what a shell needs to complete command lines"),
    "man": ("stockade.cli.man", "print the manual page"),
    "bench": ("stockade.cli.bench", "measure Stockade against its rivals on this machine"),
}

REFUSED = 125
#: How many objects are made before garbage is looked for: starting makes many, and hardly any garbage.
GARBAGE = 50_000


def command() -> NoReturn:
    """The installed command: runs this process's command line and ends the process.

    What is left is the kernel's to take back. The interpreter would first take everything apart, piece by
    piece, for as long as a sandbox takes to start.
    """
    import atexit

    gc.set_threshold(GARBAGE)
    try:
        code = main()
    except SystemExit as end:  # argparse's way out
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter itself has it
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output.Manner.quiet = output.Manner.verbose = False
    try:
        _open_streams()
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except StockadeError as error:
        output.error(error.message, hint=error.hint)
        return REFUSED
    except ModuleNotFoundError as error:
        if sys.platform == "linux":
            raise
        # Windows has no fcntl, and so nothing that keeps a sandbox.
        output.error(
            f"this needs Python's {error.name}, which this system does not have",
            hint="`stockade doctor` says what works here",
        )
        return REFUSED
    except BrokenPipeError:
        # The reader went away (`stockade doctor | head -1`): no failure, and nothing left to say.
        output.silence(1)
        return 141
    except OSError as error:
        # A full disk, a file that cannot be read: the exit code must not look like the command's own.
        output.error(output.reason(error), hint=output.advice(error))
        output.silence(1)
        return REFUSED


def _open_streams() -> None:
    """Put /dev/null where a stream is closed.

    Else a file of our own would get its number, and be given what is written to the stream.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    # The interpreter has none for a stream that it found closed, and prints to stdout what is for no stderr.
    sys.stdout = sys.stdout or os.fdopen(1, "w", errors="replace", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="replace", closefd=False)


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from stockade import __version__

        print(f"stockade {__version__}")
        return 0
    if args[0] not in COMMANDS:
        output.error(f"there is no command {args[0]!r}", hint=nearest_command(args[0], args[1:]))
        return 2
    _load_msgspec()
    module = importlib.import_module(COMMANDS[args[0]][0])
    return int(module.main(args[1:]))


def _load_msgspec() -> None:
    """Load it without the two slowest things in a start, which it has no use for.

    From typing_extensions, where that is installed, it takes a function that Python has as well; and
    Python's uuid (3.11) loads platform, with all its patterns, to be told the system's name.
    """
    if "msgspec" in sys.modules:
        return
    instead: dict[str, ModuleType | None] = {"typing_extensions": None}
    if "uuid" not in sys.modules:
        instead["platform"] = named = type(sys)("platform")
        named.system = lambda: os.uname().sysname  # type: ignore[attr-defined]
    instead = {name: module for name, module in instead.items() if name not in sys.modules}
    sys.modules.update(instead)  # type: ignore[arg-type]
    try:
        importlib.import_module("msgspec")
    finally:
        for name in instead:
            del sys.modules[name]


def usage() -> str:
    """The text of `stockade --help`."""
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
    """What to type instead of a word that is no command."""
    import difflib
    import shlex
    import shutil

    if shutil.which(word):
        return f"to run that program: stockade run -- {shlex.join([word, *rest])}"
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"did you mean `stockade {near[0]}`?" if near else "`stockade --help` lists the commands"
