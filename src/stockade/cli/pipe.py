"""`stockade pipe`: run commands at once, each in its own sandbox, connected by pipes."""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from stockade.cli import run as run_command
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import PolicyError, StockadeError

if TYPE_CHECKING:
    from stockade.pipeline import Gather, Pipeline, PipelineResult
    from stockade.result import Result

EXAMPLES = """examples:
  stockade pipe report.toml                   each stage has its own policy there
  stockade pipe -- sort words.txt '|' uniq -c '|' head
                                              all stages have the policy of `stockade run`
  stockade pipe --json report.toml | jq '.stages[].outcome'

exit codes: those of `stockade run` for the last stage, or with --pipefail for the last stage that failed;
124 if the time was over"""
SEPARATOR = "|"


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code that scripts rely on."""
    place = argv.index("--") if "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:place])
    output.set_verbosity(quiet=args.quiet, verbose=args.verbose)
    if args.command:
        raise PolicyError(
            f"unexpected argument {args.command[0]!r:.200}",
            hint="commands come after --: stockade pipe -- a '|' b",
        )
    words = argv[place + 1 :]
    try:
        return _run_and_report(args, words)
    except KeyboardInterrupt:
        if args.json:
            _print_json({"outcome": "cancelled", "ok": False, "exit_code": 130, "reason": "cancelled"})
        else:
            output.say("cancelled")
        return 130
    except (StockadeError, OSError) as error:
        if not args.json or isinstance(error, BrokenPipeError):
            raise
        why = (error.message, error.hint) if isinstance(error, StockadeError) else (output.reason(error), "")
        refused = {"outcome": "setup-failed", "ok": False, "exit_code": 125}
        _print_json({**refused, "reason": why[0], "hint": why[1]})
        return 125


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade pipe",
        description="Run commands at once, each in its own sandbox, connected by pipes of the kernel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_command.add_policy_options(parser)
    add = parser.add_argument
    add("--timeout", metavar="T", help="end all commands after this long: 30, 250ms, 5m")
    add("--pipefail", action="store_true", help="fail if any stage fails")
    add(
        "--name",
        metavar="NAME",
        default="",
        help="a name for the pipeline: its stages are NAME-stage-0 and so on in `stockade ps`, logs and "
        "receipts",
    )
    add("--json", action="store_true", help="print JSON and nothing else, with the result of each stage")
    output.add_verbosity(parser, verbose="print how each stage ended")
    add("file", nargs="?", metavar="FILE", help="a TOML file with the stages")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ... '|' COMMAND ...")
    return parser


def _run_and_report(args: argparse.Namespace, words: list[str]) -> int:
    from stockade.pipeline.stage import StageSettings, until
    from stockade.runs.io.streams import OutputCopy

    if (args.file is None) == (not words):
        raise PolicyError(
            "there is nothing to run" if args.file is None else "there are a file and commands",
            hint="write stockade pipe FILE, or stockade pipe -- COMMAND '|' COMMAND",
        )
    stages, timeout, pinned = _from_file(args) if args.file is not None else _from_words(args, words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, run_command.cancel)
    has_stdin = (
        run_command.is_open_for(0, os.O_RDONLY) and not os.isatty(0) and not hasattr(stages, "sources")
    )
    own = stages.placed[0].stage.options
    result = stages.run_with(
        StageSettings(
            stdin=0 if has_stdin and own.get("stdin") is None else None,
            timeout=timeout,
            on_stdout=None if args.json else OutputCopy(1, until(timeout)),
            stderr=None if args.json else "inherit",
            name=args.name or stages.name,
            keep_output=bool(args.json),
            pinned=pinned,
            advise=True,
            cancelled_by=(KeyboardInterrupt,),
        )
    )
    if args.json:
        plain = run_command.plain_result(result)
        plain["stages"] = {place: run_command.plain_result(one) for place, one in result.stages.items()}
        _print_json(plain)
    else:
        _report(result, verbose=args.verbose)
    return result.exit_code


def _from_file(args: argparse.Namespace) -> tuple[Pipeline | Gather, float | None, bool]:
    from stockade.pipeline.pipeline_file import load_pipeline
    from stockade.runs.limits import seconds_of

    given = next((name for name in _POLICY if getattr(args, name, None)), None)
    if given is not None:
        raise PolicyError(
            f"--{given.replace('_', '-')}: the stages of a file have their own policies",
            hint="write the policies in the file",
        )
    if not os.path.lexists(args.file):
        from stockade.policy.suggestions import for_file

        hint = for_file(args.file) or "check the path; commands come after --: stockade pipe -- a '|' b"
        raise PolicyError(f"there is no file {args.file}", hint=hint)
    found = load_pipeline(args.file)
    found.stages.pipefail |= args.pipefail
    timeout = run_command.seconds(args.timeout)
    return found.stages, timeout if timeout is not None else seconds_of(found.timeout), False


_POLICY = (
    "policy", "agent", "category", "profile", "read", "write", "deny", "unprotect", "net", "proxy", "env",
    "pass_env", "secret", "limit", "workspace", "mode", "cwd", "toolchain", "no_toolchain", "backend",
)  # fmt: skip


def _from_words(args: argparse.Namespace, words: list[str]) -> tuple[Pipeline, float | None, bool]:
    from stockade.pipeline import Pipeline, Stage

    commands: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            commands.append([])
        else:
            commands[-1].append(word)
    if [] in commands:
        raise PolicyError("a stage has no command", hint="write a command on each side of '|'")
    if args.workspace is not None and args.workspace.startswith("@"):
        raise PolicyError(
            f"-w {args.workspace}: several stages cannot continue one workspace",
            hint="name a directory: each stage has its own changes",
        )
    caller, home = run_command.user_and_state()
    found = run_command.discover_policy(args, caller, home)
    start = run_command.start_directory(args, found)
    stages = [Stage(found.policy, command, cwd=start) for command in commands]
    if len(stages) < 2:
        raise PolicyError(
            "a pipeline needs at least two stages",
            hint="quote the bar, or your shell takes it: stockade pipe -- a '|' b; one command: stockade run",
        )
    return Pipeline(stages, pipefail=args.pipefail), run_command.seconds(args.timeout), found.pinned


def _report(result: PipelineResult, *, verbose: bool) -> None:
    """Print what the stages did that the user may not expect, each with its place."""
    from stockade.cli.ui.network_report import refused_line

    for place, one in result.stages.items():
        if one.denials:
            output.say(f"{place}: {refused_line(one.denials)}")
        if verbose or not (one.ok or _is_ordinary(one)):
            output.say(f"{place}: {one.outcome}: {output.name(one.reason)}".removesuffix(": "))
        if one.hint and not one.ok:
            output.say(f"{place}: hint: {output.name(one.hint)}")
        run_command.report_handoffs(one)
        if one.changes or one.changes_cut:
            output.say(f"{place}:")
            run_command.report(one, verbose=False, discarded=False)
        if one.commit_error:
            output.error(f"{place}: not committed: {one.commit_error}")


def _is_ordinary(result: Result) -> bool:
    """Whether a stage failed as stages of pipelines do: with an exit code, or because its reader ended."""
    return result.outcome == "exited" or result.signal == signal.SIGPIPE


def _print_json(value: dict[str, object]) -> None:
    from stockade.runs.io.streams import OutputCopy

    write = OutputCopy(1)
    for piece in output.json_pieces(value):
        write(piece)
