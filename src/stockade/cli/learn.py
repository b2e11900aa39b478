"""`stockade learn`: run a command, see what it needs, and write the smallest policy that lets it pass."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import PolicyError

if TYPE_CHECKING:
    from stockade.linux.user import Caller
    from stockade.observe.learning.learned_policy import LearnedPolicy
    from stockade.observe.learning.rounds import LearningPlace, LearningRun
    from stockade.observe.records import Observations
    from stockade.policy import Policy
    from stockade.resolve.discovery import PolicySource
    from stockade.result import Decision, Result
    from stockade.runs.prepare import RunPreparation

_EXAMPLES = """examples:
  stockade learn -o policy.toml -- make test
  stockade run -p policy.toml -- make test
  stockade learn -o policy.toml --merge -- make install-docs
                                              adds what another command needs
  stockade learn --net none -o policy.toml -- ./job
                                              reaches no host; those that it asks for become questions

The command runs several times, with empty input, and its changes to the workspace are thrown away.
In each run it gets what it missed in the one before: files and hosts, but nothing that may be a secret.
What may be one, by its place, name, permissions or content, is granted only if you agree: at a terminal
Stockade asks you, elsewhere add --read PATH or --pass-env NAME. What would write for real is never granted.

Learn only from commands that you would run yourself: a hostile one chooses what it asks for. It can reach
every public host that it names, and send what it reads in the workspace there; --net none prevents that.

exit codes: the command's own from the last run; 1 if the policy is not complete; 125 refused"""

#: How many seconds a run goes on after it missed a host.
PATIENCE = 2.0
#: How many questions are printed; the file has them all.
SHOWN_QUESTIONS = 20


def main(argv: list[str]) -> int:
    """Learn a policy for the command and write it."""
    from stockade.cli.run import command

    args = build_parser().parse_args(argv)
    output.set_verbosity(quiet=args.quiet, verbose=args.verbose)
    words = command(args, "learn")
    before = _existing(args)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _cancel)
    try:
        learned, found, last = _learn(args, words)
    except KeyboardInterrupt:
        output.say("cancelled; nothing was written")
        return 130
    text = _text(args, learned, found, words, before)
    if args.json:
        _print_json(args, learned, text)
    elif last is not None and not args.quiet:
        _print_output(last, to_stderr=args.output is None)
    if args.output is not None:
        _write(args, text, before)
    elif not args.json:
        print(output.clean(text) if sys.stdout.isatty() else text, end="")
    if not args.json:
        _report(args, learned, words, text, before)
        if learned.exit_code and last is not None and last.hint:
            output.say(f"hint: {output.name(last.hint)}")
    return learned.exit_code or (0 if learned.settled else 1)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    from stockade.cli.run import add_policy_options

    parser = Parser(
        prog="stockade learn",
        description="Run a command, see what it misses, and write the smallest policy that lets it pass.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write the policy to this file (default: print it)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--merge",
        action="store_true",
        help="begin with the policy in FILE, and add what the command needs to it",
    )
    existing.add_argument("--force", action="store_true", help="replace FILE")
    add("--timeout", metavar="T", help="end each run after this long: 30, 250ms, 5m")
    add_policy_options(parser)
    add("--json", action="store_true", help="print JSON and nothing else")
    output.add_verbosity(parser, verbose="print what each run missed")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    return parser


def _existing(args: argparse.Namespace) -> str | None:
    """Return the text of the file to merge with, and refuse one that must not be replaced."""
    from stockade.integrations import settings_files
    from stockade.policy.toml import PYPROJECT

    path = args.output
    if path is None:
        if args.merge or args.force:
            raise PolicyError("there is no file to write", hint="name it: -o policy.toml")
        return None
    if os.path.basename(path) == PYPROJECT:
        raise PolicyError(
            f"{path} has more than a policy in it", hint="write a file of its own: -o policy.toml"
        )
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise PolicyError(f"{path}: there is no such directory", hint="make it first, or name another file")
    if not os.path.lexists(path):
        return None
    if os.path.exists(path) and not os.path.isfile(path):
        raise PolicyError(f"{path} is not a regular file", hint="name a new file, or one to replace")
    if args.force:
        return None
    if not args.merge:
        raise PolicyError(f"{path} exists already", hint="--merge adds to it, --force replaces it")
    if args.policy is not None and os.path.realpath(args.policy) != os.path.realpath(path):
        raise PolicyError(
            f"--merge begins with the policy in {path}, and -p names another", hint="leave out -p, or --merge"
        )
    args.policy = path
    return settings_files.read(_place(path))


def _learn(args: argparse.Namespace, words: list[str]) -> tuple[LearnedPolicy, PolicySource, Result | None]:
    from stockade.cli.run import discover_policy, seconds, start_directory, user_and_state, with_location
    from stockade.observe.learning.rounds import learn
    from stockade.policy.merging import merge

    caller, state = user_and_state()
    if args.workspace is not None and args.workspace.startswith("@"):
        raise PolicyError(
            "learn works in a directory, not in a kept workspace", hint="name a directory: -w DIR"
        )
    found = discover_policy(args, caller, state)
    start = start_directory(args, found)
    place = _learning_place(args, found.policy, caller, state)
    timeout = seconds(args.timeout)
    shown = output.name(shlex.join(words))
    if not (args.quiet or args.json):
        output.say(f"learning from {shown if len(shown) <= 80 else f'{shown[:79]}…'}")
        output.say(
            "it runs several times and its changes are thrown away; it can read what it asks for, except "
            f"what may be a secret, and {_reach(place.reach)}: learn only from commands that you trust"
        )
    policy = begin = found.policy
    if place.workspace and not args.merge:
        from stockade.cli.init import hidden_in_projects, secrets_in

        policy = begin = merge(policy, {"deny": hidden_in_projects(secrets_in(place.workspace))})
    if policy.workspace is not None and policy.workspace.mode == "rw":
        policy = merge(policy, {"workspace": {"mode": "overlay"}})
    last: list[Result] = []

    def run(trial: Policy) -> LearningRun:
        try:
            with _Impatience(place.reach) as impatience:
                one = _run_observed(words, trial, found, start, timeout, caller, state, impatience)
        except KeyboardInterrupt:
            if not impatience.over:
                raise
            with _Impatience(False) as patience:  # the run was over, and the alarm met its end
                one = _run_observed(words, trial, found, start, timeout, caller, state, patience)
        if one.result.outcome == "cancelled" and not impatience.over:
            raise KeyboardInterrupt
        last[:] = [one.result]
        return one

    def report(number: int, learned: LearnedPolicy) -> None:
        if not (args.quiet or args.json):
            output.say(_round_line(number, learned))

    try:
        learned = learn(policy, place, run, report)
    except PolicyError as error:
        raise with_location(error, found) from None
    import msgspec

    return msgspec.structs.replace(learned, start=begin), found, last[0] if last else None


class _Impatience:
    """Ends a run soon after it missed a host: programs try again for a minute, and the next run has it."""

    def __init__(self, reach: bool) -> None:
        self.over = False
        self._reach = reach
        self._armed = False

    def see(self, decision: Decision) -> None:
        """Take note of a decision of the egress."""
        missing = decision.verdict == "denied" and decision.reason == "no rule"
        if self._reach and missing and not self._armed:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def __enter__(self) -> _Impatience:
        self._before = signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _end(self, number: int, _: object) -> NoReturn:
        self.over = True
        raise KeyboardInterrupt


def _reach(reach: bool) -> str:
    return "reach every public host that it names" if reach else "reach no host"


def _run_observed(
    words: list[str],
    trial: Policy,
    found: PolicySource,
    start: str | None,
    timeout: float | None,
    caller: Caller,
    state: str,
    impatience: _Impatience,
) -> LearningRun:
    """Run the command once under a policy, throw its changes away, and return what it showed."""
    from stockade.errors import SetupError
    from stockade.observe.learning.observation import sort_observed
    from stockade.observe.view import Walls
    from stockade.sandbox import sandbox

    seen: list[tuple[Observations, Walls]] = []
    sorted_runs: list[LearningRun] = []

    def take(observed: Observations, prepared: RunPreparation) -> None:
        walls = Walls(prepared.resolved, prepared.plan.backend, found.sources)
        seen.append((observed, walls))

    result = sandbox.run_once(
        words,
        trial,
        {"cwd": start, "timeout": timeout, "on_exit": "discard", "name": "learn", "advise": True},
        sandbox.RunExtras(
            pinned=found.pinned,
            cancelled_by=(KeyboardInterrupt,),
            caller=caller,
            state=state,
            on_decision=impatience.see,
            on_observed=take,
        ),
    )
    if not seen and result.outcome not in ("cancelled", "setup-failed"):
        raise SetupError("the run was not observed, so there is nothing to learn from", stage="observer")
    for observed, walls in seen:
        sorted_runs.append(sort_observed(observed, walls, result, words[0]))
    from stockade.observe.learning.rounds import LearningRun

    return sorted_runs[-1] if sorted_runs else LearningRun(result)


def _learning_place(args: argparse.Namespace, policy: Policy, caller: Caller, state: str) -> LearningPlace:
    from stockade.cli.ui.consent import TerminalConsent
    from stockade.cli.ui.start_directory import workspace_root
    from stockade.observe.learning.rounds import LearningPlace
    from stockade.observe.learning.secret_paths import SecretPlaces
    from stockade.policy.profile import profile
    from stockade.policy.values import expand
    from stockade.resolve.config_files import config_dir
    from stockade.resolve.resolution import ungrantable
    from stockade.resolve.toolchain.needs import shown_by

    home = os.path.realpath(caller.home)
    workspace = os.path.realpath(workspace_root(policy, caller)) if policy.workspace is not None else ""
    written = [
        expand(path.removesuffix("?"), "write", home=caller.home, cwd=caller.cwd, environ=caller.environ)
        for path in policy.write
    ]
    kept_out = [workspace, state, config_dir(caller.environ, caller.home), *written]
    etc = (*profile(policy.profile).etc, *profile("dev").etc)
    return LearningPlace(
        places=SecretPlaces(
            home=home,
            tilde=home == caller.home,
            kept_out=tuple(os.path.realpath(path) for path in kept_out if path),
            public_etc=tuple(name.removesuffix("?") for name in etc),
        ),
        environ=caller.environ,
        workspace=workspace,
        system=tuple(shown_by(profile(policy.profile))),
        ungrantable=lambda path: ungrantable(path, "read", caller, state),
        consent=TerminalConsent(silent=args.json or args.quiet),
        enforceable=_enforceable(policy),
        reach=args.net != ["none"],
        narrow=not args.merge,
    )


def _enforceable(policy: Policy) -> frozenset[Any]:
    """Return the limits that this machine can enforce in full."""
    from stockade.backends.selection import select
    from stockade.controls import Control
    from stockade.errors import UnsupportedError
    from stockade.host.capabilities import Host
    from stockade.policy.merging import merge

    host = Host.current()
    found = set()
    for name, value in (("wall", 60), ("memory", 1 << 30), ("tasks", 256), ("cpu_time", 60)):
        try:
            select(merge(policy, {"limits": {name: value}}), host)
        except UnsupportedError:
            continue
        found.add(Control(f"limits.{name}"))
    return frozenset(found)


def _text(
    args: argparse.Namespace,
    learned: LearnedPolicy,
    found: PolicySource,
    words: Sequence[str],
    before: str | None,
) -> str:
    from stockade.linux.user import Caller
    from stockade.observe.learning.policy_text import merged_text, policy_text

    if before is not None:
        return merged_text(before, learned, args.output)
    from stockade.cli.ui.start_directory import workspace_root
    from stockade.policy.values import literal

    rule = found.policy.workspace
    if rule is None:
        return policy_text(learned, words)
    root = os.path.realpath(workspace_root(found.policy, Caller.current()))
    beside = args.output is not None and os.path.dirname(_place(args.output)) == root
    named = args.workspace is not None or rule.mode != "overlay"
    return policy_text(learned, words, workspace="." if beside else literal(root) if named else "")


def _place(path: str) -> str:
    """Return the real name of a file's directory, and the file in it by its own name."""
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def _write(args: argparse.Namespace, text: str, before: str | None) -> None:
    from stockade.integrations import settings_files

    path = _place(args.output)
    if before is None and not args.force and os.path.lexists(path):
        raise PolicyError(f"{args.output} appeared while the command ran", hint="--force replaces it")
    if before is not None and settings_files.read(path) != before:
        raise PolicyError(f"{args.output} changed while the command ran", hint="try again")
    if before is not None and text == before:
        return
    settings_files.write(path, text)


def _report(
    args: argparse.Namespace, learned: LearnedPolicy, words: Sequence[str], text: str, before: str | None
) -> None:
    from stockade.observe.learning.policy_text import question_line
    from stockade.resolve.config_files import NAMES

    if before is not None and not args.quiet:
        import difflib

        name = output.name(args.output)
        for line in difflib.unified_diff(
            before.splitlines(), text.splitlines(), name, name, lineterm="", n=1
        ):
            print(output.clean(line))
        sys.stdout.flush()
    for one in learned.questions[:SHOWN_QUESTIONS]:
        option = f", or learn again with {output.name(one.option)}" if one.option else ""
        output.say(f"question: {question_line(one)}{option}")
    if (more := len(learned.questions) - SHOWN_QUESTIONS) > 0:
        output.say(f"and {more} more questions")
    if not learned.settled:
        output.error(
            "the policy is not complete: the runs did not come to an end that stays the same",
            hint="`-v` shows what each run missed; what differs from run to run cannot be learned",
        )
    if learned.exit_code:
        output.say(f"the command failed in the last run too: {output.name(learned.ended)}")
    if args.output is None:
        return
    name = output.name(args.output)
    output.announce(f"nothing to add to {name}" if text == before else f"wrote {name}: {_summary(learned)}")
    if os.path.basename(args.output) in NAMES:
        output.say(
            f"a project's own policy may only narrow yours: read it, and if you agree: stockade trust {name}"
        )
        output.say(f"next: stockade run -- {output.name(shlex.join(words))}")
    else:
        verb = "explain" if learned.exit_code else "run"
        output.say(f"next: stockade {verb} -p {shlex.quote(args.output)} -- {output.name(shlex.join(words))}")


def _summary(learned: LearnedPolicy) -> str:
    from stockade.cli.ui.formats import many

    added = learned.additions
    words = {"read": "path", "net": "host", "pass_env": "variable", "toolchain": "command", "exec": "program"}
    parts = [many(len(added[name]), word) for name, word in words.items() if added.get(name)]
    parts += [many(len(learned.limits), "limit")] if learned.limits else []
    parts += [many(len(learned.questions), "question")] if learned.questions else []
    return ", ".join(parts) or "it needs nothing beyond the profile"


def _round_line(number: int, learned: LearnedPolicy) -> str:
    from stockade.cli.ui.formats import many

    ended = (
        "passed" if not learned.exit_code else output.name(learned.ended or f"exit code {learned.exit_code}")
    )
    found = {
        name: entries for name, entries in learned.additions.items() if name in ("read", "net", "toolchain")
    }
    words = {"read": "path", "net": "host", "toolchain": "command"}
    so_far = ", ".join(many(len(entries), words[name]) for name, entries in found.items())
    line = f"run {number}: {ended}; needs {so_far or 'nothing'} so far"
    if output.Verbosity.verbose:
        for entries in found.values():
            line += "".join(f"\n  {output.name(one.text)}" for one in entries)
    return line


def _print_output(result: Result, *, to_stderr: bool) -> None:
    """Print what the command printed in its last run."""
    sys.stdout.flush()
    stream = sys.stderr.buffer if to_stderr else sys.stdout.buffer
    stream.write(result.stdout)
    stream.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.buffer.flush()


def _print_json(args: argparse.Namespace, learned: LearnedPolicy, text: str) -> None:
    import msgspec

    facts = {
        "policy": learned.policy().table(),
        "text": text,
        "file": args.output,
        "added": msgspec.to_builtins(learned.additions),
        "limits": msgspec.to_builtins(learned.limits),
        "questions": msgspec.to_builtins(learned.questions),
        "notes": list(learned.notes),
        "runs": learned.runs,
        "settled": learned.settled,
        "exit_code": learned.exit_code,
    }
    sys.stdout.buffer.write(output.as_json(facts))
    sys.stdout.buffer.flush()


def _cancel(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
