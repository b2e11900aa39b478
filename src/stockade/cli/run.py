"""`stockade run`: one command behind every wall of the policy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from stockade.cli import output
from stockade.cli.light import REST, Light, NotPlainError
from stockade.errors import PolicyError, ReceiptError, SetupError, StockadeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from stockade.agents.registry import Agent
    from stockade.cli.terminal import Terminal
    from stockade.policy import Caller, Discovered
    from stockade.receipt.statement import Receipt
    from stockade.sandbox.result import Result
    from stockade.workspace.workspace import Workspace

ABOUT = {
    "run": "Run a command behind walls the kernel keeps.",
    "shell": "A shell behind walls the kernel keeps: yours ($SHELL) if it is there inside, else sh.",
    "plan": "Show what `stockade run` would do, without doing it.",
}

_RUN = """examples:
  stockade run -- python3 job.py              the current directory is an overlay: changes are kept aside
  stockade run --mode ro -- make check        read-only
  stockade run --read /opt/data --timeout 30s -- ./analyse
  stockade run -w @443c -- make check         goes on in the workspace of an earlier run
  stockade run --json -- ./job | jq .outcome

exit codes: the command's own; 128+n killed by signal n; 124 timed out; 125 refused, nothing was run;
126 denied by a wall; 127 not found inside; 130 cancelled

At a terminal the command gets one of its own. Ctrl-] three times within a second ends it."""

EXAMPLES = {
    "run": _RUN,
    "shell": """examples:
  stockade shell                              in an overlay of the current directory
  stockade shell --read /opt/data --discard
  stockade shell -w @443c                     goes on in the workspace of an earlier run
  stockade shell --keep                       lives on without a terminal; `stockade attach` comes back

Ctrl-] three times within a second ends it, whatever runs in it. With --keep it goes on.""",
    "plan": "example: stockade plan -w . --mode ro -- make check",
}

SHOWN_CHANGES = 20

#: How long after the end of its time a run still waits for a reader of ours that takes nothing.
STALLED_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code that API users script against."""
    args = parsed("run", argv)
    return run(args, lambda: [command(args)])


def run(args: argparse.Namespace, commands: Callable[[], list[list[str]]]) -> int:
    """Run the first of the commands that exists inside, and tell how it ended."""
    try:
        return _run(args, commands())
    except KeyboardInterrupt:
        if args.json or args.json_fd is not None:
            _write_json(args, {"outcome": "cancelled", "ok": False, "exit_code": 130, "reason": "cancelled"})
        elif not args.quiet:
            output.say("cancelled")
        return 130
    except BrokenPipeError:
        raise
    except (StockadeError, OSError) as error:
        if not args.json and (args.json_fd is None or not _serves(args.json_fd, os.O_WRONLY)):
            raise
        refused = {"outcome": "setup-failed", "ok": False, "exit_code": 125}
        why = (error.message, error.hint) if isinstance(error, StockadeError) else (output.reason(error), "")
        if isinstance(error, ReceiptError) and error.result is not None:
            # It has run, and whoever reads this must know how that ended.
            _write_json(args, {**_plain(error.result), "ok": False, "receipt_error": why[0]})
        else:
            _write_json(args, {**refused, "reason": why[0], "hint": why[1]})
        return 125


def parsed(command: str, argv: list[str]) -> argparse.Namespace:
    """The command line, read without argparse where it is plain."""
    try:
        light = Light()
        options(light, command)
        args: argparse.Namespace = light.parse(argv)
    except NotPlainError:
        return parser(command).parse_args(argv)
    output.heed(quiet=args.quiet, verbose=args.verbose)
    return args


def parser(command: str = "run") -> argparse.ArgumentParser:
    """The command's options."""
    import argparse

    from stockade.cli.options import Parser

    made = Parser(
        prog=f"stockade {command}",
        description=ABOUT[command],
        epilog=EXAMPLES[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options(made, command)
    return made


def options(made: argparse.ArgumentParser | Light, command: str) -> None:
    """The options that say what to run and under which policy; `plan` takes them too."""
    add = made.add_argument
    add("-p", "--policy", metavar="FILE", help="the policy; no other file is looked at")
    add("--agent", metavar="NAME", default="", help="the policy that your layers give this agent")
    add("--category", metavar="NAME", default="", help="its category, where the layers do not say")
    add("--read", metavar="PATH", action="append", help="show a path read-only")
    add("--write", metavar="PATH", action="append", help="show a path writable for real")
    add("--deny", metavar="PATH", action="append", help="hide a path, also inside what is shown")
    add("--net", metavar="open", help='"open" shares the host\'s network; default: none')
    add("--env", metavar="K=V", action="append", help="set a variable inside")
    add("--pass-env", metavar="K", action="append", help="pass a variable of yours")
    limits = "a limit: memory, tasks, cpu, cpu_time, wall, files, output, disk"
    add("--limit", metavar="K=V", action="append", help=limits)
    add(
        "-w",
        "--workspace",
        metavar="PATH|@ID",
        help="the directory to work in (default: the current one); @ID goes on with a workspace, @ the last",
    )
    add("--mode", choices=("overlay", "rw", "ro"), help="how the workspace appears (default: overlay)")
    add("--toolchain", metavar="NAME", action="append", help="show the install that a command belongs to")
    add("--no-toolchain", action="store_true", help="show no install of yours that the policy does not name")
    add("--backend", metavar="NAME", help="use this backend or refuse")
    if command != "plan":
        add("--timeout", metavar="T", help="end the command after this long: 30, 250ms, 5m")
        if command == "shell":
            add(
                "--keep",
                action="store_true",
                help="let it live on when you leave it; `stockade attach` comes back",
            )
        ends = made.add_mutually_exclusive_group()
        for word, effect in (
            ("keep", "keep changes aside (default)"),
            ("discard", "forget changes"),
            ("commit", "take changes over into your files, if the command ends by itself"),
        )[command == "shell" :]:
            ends.add_argument(f"--{word}", dest="on_exit", action="store_const", const=word, help=effect)
        add(
            "--snapshot", action="store_true", help="take a snapshot of the workspace before the command runs"
        )
        add("--receipt", metavar="FILE", help="write the signed receipt of the run to a file")
        add(
            "--who",
            metavar="K=V",
            action="append",
            help="what the receipt says about who asked: agent, category, action, words",
        )
        add("--json-fd", metavar="N", type=int, help="write the result as JSON to descriptor N")
    if command != "shell":
        add("--json", action="store_true", help="print JSON and nothing else")
    output.with_manners(made, verbose="say what was enforced")
    if command != "shell":
        add("command", nargs=REST, metavar="-- COMMAND ...")


def continued(args: argparse.Namespace) -> Workspace | None:
    """The workspace that `-w @ID` names; its directory takes the place of the id."""
    if args.workspace is None or not args.workspace.startswith("@"):
        return None
    from stockade.cli.workspaces import chosen
    from stockade.policy.values import literal

    found = chosen(args.workspace[1:] or None, quiet=args.quiet or args.json)
    args.workspace = literal(found.path)
    return found


def discovered(args: argparse.Namespace) -> Discovered:
    """The policy for these arguments, and a word where the workspace had to be left out."""
    from stockade import state
    from stockade.policy import Caller, discover
    from stockade.policy.resolve import unfit

    caller = Caller.current()
    workspace = None
    if args.workspace is None and args.mode is not None:
        workspace = caller.cwd  # asked for by its mode: it is this one or an error
    elif args.workspace is None:
        reason = unfit(caller.cwd, caller, state.state_dir(caller.environ, caller.home))
        workspace = None if reason else caller.cwd
        if reason and not args.quiet:
            output.say(f"no workspace, a private home instead: {reason}")
    if args.agent and args.policy is None and (known := _registered(args, caller)) is not None:
        from stockade.agents.policies import policy_for

        return policy_for(known, caller, flags=_flags(args), workspace=workspace)
    return discover(
        caller.cwd,
        caller.environ,
        caller.home,
        flags=_flags(args),
        file=args.policy,
        workspace=workspace,
        agent=args.agent,
        category=args.category,
    )


def _registered(args: argparse.Namespace, caller: Caller) -> Agent | None:
    """The agent that was named, as the registry has it; its category is said in the receipt too."""
    from stockade import state
    from stockade.agents import policies, registry

    if registry.NAME.fullmatch(args.agent) is None:
        return None
    found = registry.find(state.state_dir(caller.environ, caller.home), args.agent)
    args.category = policies.agreed(found, args.agent, args.category)
    return found


def command(args: argparse.Namespace) -> list[str]:
    """The command without the -- before it."""
    words: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise PolicyError("there is no command to run", hint="write it after --: stockade run -- COMMAND ...")
    return words


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    workspace = {key: value for key, value in (("path", args.workspace), ("mode", args.mode)) if value}
    flags: dict[str, Any] = {
        "read": args.read,
        "write": args.write,
        "deny": args.deny,
        "pass_env": args.pass_env,
        "net": args.net if args.net in (None, "open") else [args.net],
        "backend": args.backend,
        "env": _pairs("--env", args.env),
        "limits": _pairs("--limit", args.limit),
        "workspace": workspace,
        "toolchain": False if args.no_toolchain else args.toolchain,
    }
    return {key: value for key, value in flags.items() if value or value is False}


def who_asks(args: argparse.Namespace) -> dict[str, str] | None:
    """What the receipt says: the agent that the policy is for, and what was said besides."""
    policy = {"agent": args.agent, "category": args.category}
    said = _pairs("--who", args.who)
    for name, value in policy.items():
        if value and said.get(name, value) != value:
            raise PolicyError(
                f"--who {name}={said[name]}: the policy is that of --{name} {value}",
                hint=f"leave out --who {name}=, which is said by --{name}",
            )
    return {name: value for name, value in (policy | said).items() if value} or None


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise PolicyError(f"{option} {pair!r}: is not K=V", hint=f"write {option} NAME=VALUE")
        pairs[key] = value
    return pairs


def _run(args: argparse.Namespace, commands: list[list[str]]) -> int:
    if args.json_fd is not None and not _serves(args.json_fd, os.O_WRONLY):
        raise PolicyError(
            f"--json-fd {args.json_fd}: is not open for writing", hint="open it: --json-fd 3 3> result.json"
        )
    with _receipt(args.receipt) as keep:
        return _supervised(args, commands, keep)


def _supervised(
    args: argparse.Namespace, commands: list[list[str]], keep: Callable[[Receipt | None], None]
) -> int:
    workspace = continued(args)
    found = discovered(args)
    from stockade.sandbox import sandbox

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _cancel)
    quiet = args.quiet or args.json
    # `nohup` gives its command a stdin that cannot be read.
    stdin: int | None = 0 if _serves(0, os.O_RDONLY) else None
    at_terminal = stdin is not None and os.isatty(stdin)
    if at_terminal:
        stdin = None
    timeout = seconds(args.timeout)
    limits = [limit for limit in (timeout, found.policy.limits.wall) if limit is not None]
    until = time.monotonic() + min(limits) + STALLED_SECONDS if limits else None
    sinks = None if args.json else (_Passing(1, until), _Passing(2, until))
    for words in commands:
        terminal = _terminal(until) if at_terminal and sinks else None
        try:
            result = sandbox.run(
                words,
                found.policy,
                timeout=timeout,
                stdin=stdin,
                on_stdout=sinks and sinks[0],
                on_stderr=sinks and sinks[1],
                on_exit=args.on_exit or "keep",
                workspace=workspace,
                snapshot=args.snapshot,
                who=who_asks(args),
                keep_output=bool(args.json),
                pinned=found.pinned,
                cancelled_by=(KeyboardInterrupt,),
                terminal=terminal,
            )
        finally:
            if terminal is not None:
                terminal.close()
        if (result.outcome, result.exit_code) != ("setup-failed", 127):
            break
    try:
        keep(result.receipt)
    except ReceiptError as error:
        error.result = result
        raise
    if args.json or args.json_fd is not None:
        _write_json(args, _plain(result))
    if sinks:
        if terminal is None or result.signal != signal.SIGINT:  # who typed Ctrl-C knows why it ended
            report_end(result, quiet=quiet)
        if any(sink.lost for sink in sinks) or (terminal is not None and terminal.lost):
            output.error("output was lost: its reader took nothing more until the time was over")
    if not quiet:
        report(result, verbose=args.verbose, discarded=args.on_exit == "discard")
    if result.lost and not args.json:
        from stockade.workspace.layers import lost

        output.error(lost(result.lost), hint="free some space in Stockade's state, and run it again")
    if result.commit_error and not args.json:
        reason, _, hint = result.commit_error.rpartition("\n")
        output.error(f"not committed: {reason or hint}", hint=hint if reason else "")
    return result.exit_code


def _receipt(path: str | None) -> contextlib.AbstractContextManager[Callable[[Receipt | None], None]]:
    """Where the receipt of the run goes, besides the log."""
    if path is None:
        return contextlib.nullcontext(lambda receipt: None)
    from stockade.cli.receipt_file import kept_in

    return kept_in(path)


def _terminal(until: float | None) -> Terminal:
    from stockade.cli.terminal import Terminal

    return Terminal(until)


def seconds(text: str | None) -> float | None:
    """A duration as policies write it; a bare number is seconds."""
    from stockade.policy import Limits

    if text is None:
        return None
    try:
        number = text.isascii() and text.replace(".", "", 1).isdigit()
        return Limits(wall=float(text) if number else text).wall
    except PolicyError as error:
        raise PolicyError(f"--timeout {text!r}: is not a time", hint=error.hint) from None


def _cancel(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _serves(descriptor: int, way: int) -> bool:
    """Whether the descriptor is open for O_RDONLY or O_WRONLY, or both ways."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE in (way, os.O_RDWR)
    except (OSError, ValueError, OverflowError):  # the last two for numbers that no descriptor has
        return False


class _Passing:
    """Hands everything on to a descriptor, blocking or not.

    Whoever waits here watches no time. So from `until` on a reader that takes nothing is not waited for,
    and what comes after that is lost, as when a program is ended while it writes to a full pipe.
    """

    def __init__(self, descriptor: int, until: float | None = None) -> None:
        self.lost = False
        self._descriptor = descriptor
        self._until = until
        # This much fits into a pipe that is ready; more may block, which matters only if time does.
        self._most = None if until is None else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.lost:
            patience = None if self._until is None else max(0.0, self._until - time.monotonic()) * 1000
            if not self._poll.poll(patience):
                self.lost = True
                break
            try:
                view = view[os.write(self._descriptor, view[: self._most]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise
            except OSError as error:
                raise SetupError(
                    f"descriptor {self._descriptor} cannot be written: {error.strerror}",
                    stage="output",
                    errno=error.errno or 0,
                ) from None


def report_end(result: Result, *, quiet: bool) -> None:
    """Why the command ended, where it did not end by itself."""
    if result.outcome == "cancelled":
        if not quiet:
            output.say(f"cancelled: {result.reason}")
    elif result.outcome == "exited":
        if result.hint and not quiet:
            output.say(f"hint: {result.hint}")
    else:
        output.error(f"{result.outcome}: {result.reason}", hint=result.hint)


def report(result: Result, *, verbose: bool, discarded: bool) -> None:
    """What was changed, and if asked what was enforced."""
    if result.changes:
        count = len(result.changes)
        many = f"{count} changed path{'s' if count > 1 else ''}"
        if result.committed is not None:
            output.say(f"{many}, {len(result.committed.changes)} committed to your files")
        else:
            output.say(
                f"{many} discarded" if discarded else f"{many} kept aside, your files are as they were"
            )
        for change in result.changes[:SHOWN_CHANGES]:
            output.say(f"  {change.kind:<8}  {output.name(change.path)}")
        if count > SHOWN_CHANGES:
            output.say(f"  and {count - SHOWN_CHANGES} more")
    if result.committed is not None and result.changes:
        from stockade.cli.commit import remarks

        remarks(result.committed)
    elif result.changes and not discarded:
        for word, effect in (
            ("diff", "shows them"),
            ("commit", "takes them over"),
            ("discard", "forgets them"),
        ):
            output.say(f"`stockade {word} {result.workspace}` {effect}")
    if verbose:
        for name, kept in result.controls.items():
            output.say(f"{name}: {kept.mechanism} ({kept.observed})")


def _plain(result: Result) -> dict[str, Any]:
    """The result as JSON shows it: output as text, or base64 where it is not UTF-8."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(result)
    for name in ("stdout", "stderr"):
        try:
            plain[name] = getattr(result, name).decode("utf-8")
        except UnicodeDecodeError:
            plain[f"{name}_base64"] = plain.pop(name)
    plain["ok"] = result.ok
    if (receipt := result.receipt) is not None:
        plain["receipt"] = {"id": receipt.id, "hash": receipt.hash, "key": receipt.predicate.key}
    return plain


def _write_json(args: argparse.Namespace, value: dict[str, Any]) -> None:
    data = output.as_json(value)
    if args.json:
        sys.stdout.flush()
    _Passing(1 if args.json else args.json_fd)(data)
