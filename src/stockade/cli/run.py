"""`stockade run`: one command behind every wall of the policy."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from stockade.cli import output
from stockade.errors import PolicyError, StockadeError

if TYPE_CHECKING:
    from stockade.policy import Discovered
    from stockade.sandbox.result import Result

EXAMPLES = """examples:
  stockade run -- python3 job.py              the current directory is an overlay: changes are kept aside
  stockade run --mode ro -- make check        read-only
  stockade run --read /opt/data --timeout 30s -- ./analyse
  stockade run --json -- ./job | jq .outcome

exit codes: the command's own; 128+n killed by signal n; 124 timed out; 125 refused, nothing was run;
126 denied by a wall; 127 not found inside; 130 cancelled"""

SHOWN_CHANGES = 20


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code that API users script against."""
    args = parser("run").parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        if args.json or args.json_fd is not None:
            _write_json(args, {"outcome": "cancelled", "ok": False, "exit_code": 130, "reason": "cancelled"})
        elif not args.quiet:
            output.say("cancelled")
        return 130
    except StockadeError as error:
        if not (args.json or args.json_fd is not None):
            raise
        refused = {"outcome": "setup-failed", "ok": False, "exit_code": 125}
        if args.json or _is_open(args.json_fd):
            _write_json(args, {**refused, "reason": error.message, "hint": error.hint})
            return 125
        raise


def parser(command: str) -> argparse.ArgumentParser:
    """The options that say what to run and under which policy; `plan` takes them too."""
    made = argparse.ArgumentParser(
        prog=f"stockade {command}",
        description="Run a command behind walls the kernel keeps."
        if command == "run"
        else "Show what `stockade run` would do, without doing it.",
        epilog=EXAMPLES if command == "run" else "example: stockade plan -w . --mode ro -- make check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("-p", "--policy", metavar="FILE", help="the policy; no other file is looked at")
    add("--read", metavar="PATH", action="append", help="show a path read-only")
    add("--write", metavar="PATH", action="append", help="show a path writable for real")
    add("--net", metavar="open", help='"open" shares the host\'s network; default: none')
    add("--env", metavar="K=V", action="append", help="set a variable inside")
    add("--pass-env", metavar="K", action="append", help="pass a variable of yours")
    add("--limit", metavar="K=V", action="append", help="a limit: wall, tasks, files, output")
    add("-w", "--workspace", metavar="PATH", help="the directory to work in (default: the current one)")
    add("--mode", choices=("overlay", "rw", "ro"), help="how the workspace appears (default: overlay)")
    add("--backend", metavar="NAME", help="use this backend or refuse")
    if command == "run":
        add("--timeout", metavar="T", help="end the command after this long: 30, 250ms, 5m")
        ends = made.add_mutually_exclusive_group()
        for word, effect in (("keep", "keep changes aside (default)"), ("discard", "forget changes")):
            ends.add_argument(f"--{word}", dest="on_exit", action="store_const", const=word, help=effect)
        add("--json-fd", metavar="N", type=int, help="write the result as JSON to descriptor N")
    add("--json", action="store_true", help="print JSON and nothing else")
    add("-v", "--verbose", action="store_true", help="say what was enforced")
    add("-q", "--quiet", action="store_true", help="say nothing but errors")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    return made


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
    return discover(
        caller.cwd, caller.environ, caller.home, flags=_flags(args), file=args.policy, workspace=workspace
    )


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
        "pass_env": args.pass_env,
        "net": args.net,
        "backend": args.backend,
        "env": _pairs("--env", args.env),
        "limits": _pairs("--limit", args.limit),
        "workspace": workspace,
    }
    return {key: value for key, value in flags.items() if value}


def _pairs(option: str, given: list[str] | None) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise PolicyError(f"{option} {pair!r}: is not K=V", hint=f"write {option} NAME=VALUE")
        pairs[key] = int(value) if option == "--limit" and value.isdigit() else value
    return pairs


def _run(args: argparse.Namespace) -> int:
    words = command(args)
    if args.json_fd is not None and not _is_open(args.json_fd):
        raise PolicyError(
            f"--json-fd {args.json_fd}: is not open", hint=f"open it: {args.json_fd}> result.json"
        )
    found = discovered(args)
    from stockade.sandbox import sandbox

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _cancel)
    quiet = args.quiet or args.json
    stdin: int | None = 0 if _is_open(0) else None
    if stdin is not None and os.isatty(stdin):
        stdin = None
        if not quiet:
            output.say("stdin is a terminal, which is never handed in: the program gets an empty one")
    result = sandbox.run(
        words,
        found.policy,
        timeout=_seconds(args.timeout),
        stdin=stdin,
        on_stdout=None if args.json else _passing(1),
        on_stderr=None if args.json else _passing(2),
        on_exit=args.on_exit or "keep",
        keep_output=bool(args.json),
        pinned=found.pinned,
    )
    if args.json or args.json_fd is not None:
        _write_json(args, _plain(result))
    if not args.json:
        _report_end(result)
    if not quiet:
        _report(result, verbose=args.verbose, discarded=args.on_exit == "discard")
    return result.exit_code


def _seconds(text: str | None) -> float | None:
    """A duration as policies write it; a bare number is seconds."""
    from stockade.policy import Limits

    if text is None:
        return None
    try:
        return Limits(wall=float(text) if text.replace(".", "", 1).isdigit() else text).wall
    except PolicyError as error:
        raise PolicyError(f"--timeout {text!r}: is not a time", hint=error.hint) from None


def _cancel(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _passing(descriptor: int) -> Any:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write


def _report_end(result: Result) -> None:
    """Why the command ended, where it did not end by itself."""
    if result.outcome != "exited":
        output.error(f"{result.outcome}: {result.reason}", hint=result.hint)


def _report(result: Result, *, verbose: bool, discarded: bool) -> None:
    """What was changed, and if asked what was enforced."""
    if result.changes:
        count = len(result.changes)
        many = f"{count} changed path{'s' if count > 1 else ''}"
        output.say(f"{many} discarded" if discarded else f"{many} kept aside, your files are as they were")
        for change in result.changes[:SHOWN_CHANGES]:
            output.say(f"  {change.kind:<8}  {output.name(change.path)}")
        if count > SHOWN_CHANGES:
            output.say(f"  and {count - SHOWN_CHANGES} more")
        if not discarded:
            output.say(f"workspace {result.workspace}: {_layer(result.workspace)}")
    if verbose:
        for name, kept in result.controls.items():
            output.say(f"{name}: {kept.mechanism} ({kept.observed})")


def _layer(id: str) -> str:
    from stockade import state
    from stockade.policy import Caller

    caller = Caller.current()
    return os.path.join(state.state_dir(caller.environ, caller.home), "workspaces", id, "upper")


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
    return plain


def _write_json(args: argparse.Namespace, value: dict[str, Any]) -> None:
    import msgspec

    data = msgspec.json.encode(output.plain(value)) + b"\n"
    if args.json:
        sys.stdout.flush()
    _passing(1 if args.json else args.json_fd)(data)
