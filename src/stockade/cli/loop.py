"""`stockade loop`: let a coding agent work on a list of items, each attempt in a sandbox, each judged."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import age, many, print_json
from stockade.errors import NotFoundError, PolicyError
from stockade.linux.user import Caller

if TYPE_CHECKING:
    from stockade.loop.events import ItemSummary, LoopEvent
    from stockade.loop.loop import Loop
    from stockade.loop.record import LoopRecord, Store

REFUSED = 125
EXIT_PAUSED = 5
#: Each part of the command: its line of help, what it does, an example.
PARTS = {
    "status": (
        "show the items of a loop and how far it is",
        "Show the last loop of this directory: its items, attempts and costs.",
        "stockade loop status",
    ),
    "resume": (
        "go on with a loop that was paused, stopped or killed",
        "Go on with a loop: with the policy, agent and items that it was started with. An attempt that was\n"
        "under way when the loop was killed starts anew and does not count. Nothing lands twice.",
        "stockade loop resume",
    ),
    "retry": (
        "give an item its attempts again",
        "Give an item that failed or was skipped its attempts again. A loop that runs takes it up at once;\n"
        "otherwise `stockade loop resume` does.",
        "stockade loop retry US-3",
    ),
    "skip": (
        "leave an item out",
        "Leave an item out, and what depends on it. A loop that runs ends the attempt at once.",
        "stockade loop skip US-3",
    ),
    "logs": (
        "print what an agent and the judge printed",
        "Print the readable log of an attempt and what its judge printed; without an item, list the logs.",
        "stockade loop logs US-3 --attempt 2",
    ),
}
EXIT_CODES = """exit codes: 0 every item has landed; 1 some failed or were skipped; 3 all landed, but files
wait for you; 4 the loop's budget is used up; 5 paused or ended by you; 70 a sandbox failed and the
loop stopped; 125 refused, nothing was started"""


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:at])
    args.agent = argv[at + 1 :]
    if args.part is not None:
        if args.agent:
            raise PolicyError(f"{args.part} takes no agent", hint=f"stockade loop {args.part}")
        return PART_FUNCTIONS[args.part](args)
    return _start(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade loop",
        usage=f"stockade loop [OPTIONS] -- AGENT ...\n       stockade loop {' | '.join(PARTS)} ...",
        description="Let a coding agent work on items without you. Each attempt runs in a sandbox over a\n"
        "fresh copy-on-write view of this directory. A verify command judges it in a second sandbox, with\n"
        "the judge's files as they were; only then do the changes land, and files that your tools would\n"
        "run or obey wait for you. [loop] of a trusted stockade.toml can say all of it.",
        epilog="examples:\n"
        "  stockade loop --items prd.json --verify 'pytest -q' --judge tests -- claude\n"
        "  stockade loop --items todo.md --verify 'make check' --attempts 2 --parallel 2 -- codex\n"
        "  stockade loop --items '!bd ready --json' --verify 'npm test' --budget loop.cost=20 -- claude\n"
        "  stockade loop --items prd.json --verify ./check --best-of 3 -- ./my-agent {prompt_file}\n"
        "  stockade loop status\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.note = "the agent's command comes after --"
    add = parser.add_argument
    add("--items", metavar="FILE", help="the work items: TOML, JSON, prd.json, a Markdown checklist, a "
        "directory of Harbor tasks, or '!COMMAND' that prints JSON")  # fmt: skip
    add("--kind", metavar="KIND", help="what the items are, if their name does not say it: toml, json, "
        "markdown, harbor or command")  # fmt: skip
    add("--verify", metavar="COMMAND", help="the command that judges an attempt: 0 is success")
    add("--judge", metavar="PATH", action="append", help="what judges, besides the settings of test runners: "
        "the judge sees it as it was, whatever the attempt did to it")  # fmt: skip
    add("--no-judge-defaults", action="store_true", help="only what --judge names is the judge's")
    add("--report", metavar="FILE|stdout|none", help="where the verify command writes JUnit XML or TAP "
        "(default: the loop tells pytest to write it)")  # fmt: skip
    add("--strict", action="store_true", help="success needs exit code 0, even if some tests failed before")
    add("--attempts", metavar="N", type=int, help="how many attempts an item gets (default: 3)")
    add("--best-of", metavar="N", type=int, help="run N attempts at a time and keep the first that passes")
    add("--score", metavar="COMMAND", help="with --best-of: keep the passed attempt for which this command "
        "prints the highest number")  # fmt: skip
    add("--parallel", metavar="N", type=int, help="work on N items at a time; they land in order")
    add("--budget", metavar="SCOPE.LIMIT=VALUE", action="append", default=[], help="attempt, item or loop, "
        "and time, idle, tokens or cost: attempt.time=30m, loop.cost=20")  # fmt: skip
    add("--verify-timeout", metavar="T", help="end the verify command after this long (default: 30m)")
    add("--git-commit", action="store_true", help="make a git commit for each item that lands")
    add("--notify", metavar="COMMAND", help="run this command, outside, when an item or the loop is over")
    add("-p", "--policy", metavar="FILE", help="the policy of the sandboxes; no other file is read")
    add("--dry-run", action="store_true", help="show what would be done, and start nothing")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--tui", action="store_true", help="show the loop on the whole terminal")
    shown.add_argument(
        "--json", action="store_true", help="print every event as a line of JSON, the summary last"
    )
    output.add_verbosity(parser, verbose="print what agents and the judge print")
    parts = parser.add_subparsers(dest="part", metavar=" | ".join(PARTS), prog="stockade loop")
    for name, (line, text, example) in PARTS.items():
        part = parts.add_parser(
            name,
            help=line,
            description=text,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in ("retry", "skip"):
            part.add_argument("item", metavar="ITEM", help="the item's id, or its beginning")
        if name == "logs":
            part.add_argument("item", metavar="ITEM", nargs="?", help="the item's id, or its beginning")
            part.add_argument("--attempt", metavar="N", type=int, help="which attempt (default: the last)")
        part.add_argument(
            "--loop", metavar="LOOP", help="the loop's id (default: the last of this directory)"
        )
        if name in ("status", "resume"):
            part.add_argument("--json", action="store_true", help="print JSON and nothing else")
        if name == "resume":
            part.add_argument("--tui", action="store_true", help="show the loop on the whole terminal")
            output.add_verbosity(part, verbose="print what agents and the judge print")
    return parser


def _start(args: argparse.Namespace) -> int:
    from stockade.loop.items.load import load_items
    from stockade.loop.loop import check_policy, check_request, create_loop
    from stockade.loop.settings import make_settings, parse_budgets
    from stockade.loop.settings_file import find_settings

    caller = Caller.current()
    said = find_settings(caller, args.policy)
    table = {**said.found, **_flags(args)}
    for scope, part in parse_budgets(args.budget).items():
        known = table.setdefault("budget", {})
        known[scope] = {**known.get(scope, {}), **part}
    if "attempt" in table.get("budget", {}):
        from stockade.loop.settings import ATTEMPT_SECONDS

        table["budget"]["attempt"] = {"time": ATTEMPT_SECONDS, **table["budget"]["attempt"]}
    settings = make_settings(table, "stockade loop")
    if not settings.items:
        raise PolicyError("no items are named", hint="write --items FILE, or items = ... below [loop]")
    if not settings.agent:
        raise PolicyError("no agent is named", hint="write its command after --: stockade loop ... -- claude")
    policy, project = _policy(args, caller)
    items = load_items(settings.items, kind=settings.kind, commands=True)
    if args.dry_run:
        check_request(settings, items, project)
        return _dry_run(settings, items, check_policy(policy, project), project, args.json)
    _check_terminal(args)
    return _run(create_loop(settings, items, policy, project), args)


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    from stockade.runs.limits import seconds_of

    found: dict[str, Any] = {
        "items": args.items,
        "kind": args.kind,
        "verify": args.verify,
        "judge": None if args.judge is None else tuple(args.judge),
        "judge_defaults": False if args.no_judge_defaults else None,
        "report": args.report,
        "strict": args.strict or None,
        "attempts": args.attempts,
        "best_of": args.best_of,
        "score": args.score,
        "parallel": args.parallel,
        "verify_timeout": seconds_of(args.verify_timeout),
        "git_commit": args.git_commit or None,
        "notify": args.notify,
        "agent": tuple(args.agent) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _policy(args: argparse.Namespace, caller: Caller) -> tuple[Any, str]:
    """Return the policy of the loop's sandboxes, and the project: the directory that they work in."""
    from stockade import state
    from stockade.resolve.discovery import discover
    from stockade.resolve.resolution import unfit

    if not caller.cwd:
        raise PolicyError("the current directory was removed", hint="go to the project")
    found = discover(
        caller.cwd, caller.environ, caller.home, flags={}, file=args.policy, workspace=caller.cwd
    )
    rule = found.policy.workspace
    project = os.path.realpath(caller.cwd if rule is None else rule.path.replace("$$", "$"))
    if reason := unfit(project, caller, state.state_dir(caller.environ, caller.home)):
        raise PolicyError(f"a loop cannot work here: {reason}", hint="go to the directory of a project")
    return found.policy, project


def _dry_run(settings: Any, items: Any, policy: Any, project: str, as_json: bool) -> int:
    """Show what a loop would do: which items, in which order, judged by what, behind which walls."""
    from stockade.backends.selection import select
    from stockade.host import Host
    from stockade.loop.items.item import order_items
    from stockade.loop.recipes.recipe import recipe_for

    recipe = recipe_for(settings.agent)
    whole = recipe.extend(policy)
    chosen = select(whole, Host.current())
    ordered = order_items(items)
    if as_json:
        import msgspec

        plain = {"items": ordered, "settings": settings, "policy": whole.table(), "backend": chosen.backend}
        print_json({"project": project, **msgspec.to_builtins(plain)})
        return 0
    print(f"project  {output.name(project)}")
    print(f"agent    {output.clean(recipe.describe())}")
    print(f"key      {recipe.describe_key(whole)}")
    print(f"walls    {chosen.backend}: {many(len(chosen.controls), 'control')} enforced")
    print(f"network  {whole.net if isinstance(whole.net, str) else ', '.join(whole.net) or 'none'}")
    print(f"verify   {output.name(settings.verify)}")
    rows = [[item.id, item.title, ", ".join(item.depends_on), item.verify] for item in ordered]
    print(output.table(rows, ["ITEM", "TITLE", "AFTER", "OWN VERIFY"], cut=(1,)))
    return 0


def _check_terminal(args: argparse.Namespace) -> None:
    """Refuse --tui where no terminal is, or without its extra, before a loop has been made."""
    if args.tui:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise PolicyError("--tui needs a terminal", hint="leave it out, or write --json")
        from stockade.loop.tui import import_app

        import_app()


def _show(loop: Loop) -> int:
    """Run a loop on the whole terminal, and print its summary when the user has left."""
    from stockade.loop.tui import run_tui

    ended = run_tui(loop)
    if ended is None:
        _print_summary(loop.record, "paused", "`stockade loop resume` continues it")
        return EXIT_PAUSED
    if ended.outcome == "held" and all(one.phase == "landed" for one in loop.record.items):
        _print_summary(loop.record, "done", "every item has landed")
        return 0
    _print_summary(loop.record, ended.outcome, ended.reason)
    return ended.exit_code


def _run(loop: Loop, args: argparse.Namespace) -> int:
    if args.tui:
        return _show(loop)
    reporter = _print_json_event if args.json else _Reporter(loop, verbose=output.Verbosity.verbose)
    loop.listen(reporter)
    with _signals(loop, quiet=args.json):
        ended = loop.run()
    if not args.json:
        _print_summary(loop.record, ended.outcome, ended.reason)
        if ended.exit_code == EXIT_PAUSED:
            output.say("`stockade loop resume` continues it")
    return ended.exit_code


@contextlib.contextmanager
def _signals(loop: Loop, *, quiet: bool) -> Iterator[None]:
    """Let the first Ctrl-C pause the loop, and the second one, or a TERM, end it at once."""
    pressed = 0

    def interrupted(number: int, _frame: object) -> None:
        nonlocal pressed
        pressed += 1
        if number == signal.SIGINT and pressed == 1:
            if not quiet:
                output.say("the loop stops after this attempt; Ctrl-C again ends it now")
            loop.request_pause()
        else:
            loop.request_kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A signal that is ignored stays ignored: nohup wants the loop to survive its terminal.
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupted) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_json_event(event: LoopEvent) -> None:
    import msgspec

    print_json(msgspec.to_builtins(event))


class _Reporter:
    """Prints what happens in a loop, a line for each step."""

    def __init__(self, loop: Loop, *, verbose: bool) -> None:
        self._loop = loop
        self._verbose = verbose

    def __call__(self, event: LoopEvent) -> None:
        from stockade.loop import events

        match event:
            case events.LoopStart():
                word = "goes on" if event.resumed else "begins"
                output.say(
                    f"loop {event.loop} {word}: {many(len(event.items), 'item')}, agent {event.shown_agent}, "
                    f"behind the walls of {event.backend}"
                )
                output.say(f"the agent's key: {self._loop.key}")
            case events.BaselineEnd():
                tests = (
                    f"{many(event.passed, 'test')} passed, {event.failed} failed"
                    if event.reported
                    else "no report"
                )
                output.say(f"before any change: the verify command exits with {event.exit_code}, {tests}")
            case events.AttemptStart():
                output.say(f"{output.name(event.item)}: attempt {event.attempt} begins")
            case events.AgentLine() | events.JudgeLine() if self._verbose:
                output.say(f"{output.name(event.item)}#{event.attempt} | {event.text}")
            case events.RateLimitWait():
                later = f"the next attempt starts in {age(event.seconds)}"
                output.say(f"{output.name(event.item)}: {event.reason}; {later}")
            case events.AttemptEnd() if event.outcome != "passed":
                output.say(
                    f"{output.name(event.item)}: attempt {event.attempt}: {event.outcome}: {event.reason}"
                )
            case events.LandingConflict():
                paths = ", ".join(event.paths[:5])
                output.say(f"{output.name(event.item)}: the project changed meanwhile: {paths}")
            case events.Landing():
                made = f", git commit {event.git_commit[:12]}" if event.git_commit else ""
                output.say(
                    f"{output.name(event.item)}: landed: {many(event.diff.files, 'file')}, "
                    f"+{event.diff.added} -{event.diff.removed}{made}"
                )
            case events.HeldBackFiles():
                for one in event.files[:20]:
                    output.say(f"{output.name(event.item)}: held back: {one.path}: {one.why}")
                output.say(
                    f"read them: stockade diff {event.workspace}; then: stockade commit {event.workspace} "
                    "--allow-exec-config"
                )
            case events.ItemEnd() if event.phase in ("failed", "skipped"):
                output.say(f"{output.name(event.item)}: {event.phase}: {event.reason}")
                if event.phase == "failed":
                    output.say(f"read what was printed: stockade loop logs {output.name(event.item)}")
            case events.LoopWarning():
                output.say(f"warning: {event.text}")
            case events.SandboxFailure():
                output.error(event.message, hint=event.hint or f"the log is {event.log}")
            case _:
                pass


def _print_summary(record: LoopRecord, outcome: str, reason: str) -> None:
    rows = [_row(one) for one in record.summaries()]
    heads = ["ITEM", "STATE", "ATTEMPTS", "CHANGES", "TIME", "COST", "RECEIPT", "TITLE"]
    print(output.table(rows, heads, cut=(7,)))
    spent = record.spending
    cost = f", ${spent.cost_usd:.2f}" if spent.cost_usd else ""
    tokens = f", {spent.tokens} tokens" if spent.tokens else ""
    print(f"loop {record.id}: {outcome}: {reason} ({age(spent.seconds)}{tokens}{cost})")


def _row(one: ItemSummary) -> list[str]:
    changes = f"{one.diff.files} +{one.diff.added} -{one.diff.removed}" if one.diff.files else ""
    cost = f"${one.spending.cost_usd:.2f}" if one.spending.cost_usd else ""
    receipt = one.receipts[0] if one.receipts else ""
    return [
        one.item, one.phase, str(one.attempts), changes, age(one.spending.seconds), cost, receipt, one.title,
    ]  # fmt: skip


def _store(args: argparse.Namespace) -> Store:
    from stockade.loop.record import find_store

    return find_store(args.loop, os.path.realpath(Caller.current().cwd or "/"))


def _status(args: argparse.Namespace) -> int:
    import msgspec

    from stockade.loop.record import is_locked

    store = _store(args)
    record = store.read()
    running = is_locked(record.project)
    state = "running" if running else record.outcome or "killed"
    if args.json:
        shown = msgspec.to_builtins(record.summaries())
        print_json(
            {
                "loop": record.id,
                "project": record.project,
                "state": state,
                "reason": record.reason,
                "items": shown,
                "spending": msgspec.to_builtins(record.spending),
                "logs": f"{store.path}/attempts",
            }
        )
        return 0
    hint = "`stockade loop resume` goes on" if not running and state != "done" else record.reason
    _print_summary(record, state, hint)
    for one in record.items:
        for held in one.held:
            print(f"held back: {output.name(one.item.id)}: {output.name(held.path)}: {output.name(held.why)}")
    return 0


def _resume(args: argparse.Namespace) -> int:
    from stockade.loop.loop import Loop

    _check_terminal(args)
    return _run(Loop(_store(args)), args)


def _change(args: argparse.Namespace) -> int:
    """Retry or skip an item: at once, or by the loop that runs."""
    from stockade.loop.loop import Loop
    from stockade.loop.record import LoopError, project_lock

    store = _store(args)
    record = store.read()
    item = record.find(args.item).item.id
    word = "gets its attempts again" if args.part == "retry" else "is skipped"
    try:
        with project_lock(record.project):
            loop = Loop(store)
            (loop.retry if args.part == "retry" else loop.skip)(item)
    except LoopError as error:
        if "another loop works" not in error.message:
            raise
        store.ask({"do": args.part, "item": item})
        output.say(f"asked the loop that runs: {output.name(item)} {word}")
        return 0
    output.say(f"{output.name(item)} {word}; `stockade loop resume` goes on")
    return 0


def _logs(args: argparse.Namespace) -> int:
    from stockade.loop.record import file_name

    store = _store(args)
    record = store.read()
    if args.item is None:
        if not any(one.attempts for one in record.items):
            output.say(f"loop {record.id} has had no attempt yet")
        for one in record.items:
            for attempt in one.attempts:
                path = f"{store.path}/attempts/{file_name(one.item.id)}-{attempt.number}"
                how = attempt.outcome or "under way"
                print(f"{output.name(one.item.id)} {attempt.number} {how}: {output.name(path)}")
        return 0
    found = record.find(args.item)
    if not found.attempts:
        raise NotFoundError(
            f"{output.name(found.item.id)} has had no attempt",
            hint="`stockade loop status` shows how far it is",
        )
    number = args.attempt or found.attempts[-1].number
    place = f"{store.path}/attempts/{file_name(found.item.id)}-{number}"
    if not os.path.isdir(place):
        raise NotFoundError(f"there is no attempt {number}", hint="`stockade loop logs` lists them")
    for name in ("agent.log", "judge.log"):
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"{place}/{name}", encoding="utf-8", errors="replace") as file,
        ):
            print(f"--- {place}/{name}")
            for line in file:
                sys.stdout.write(output.clean(line.rstrip("\n")) + "\n")
    return 0


PART_FUNCTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "status": _status,
    "resume": _resume,
    "retry": _change,
    "skip": _change,
    "logs": _logs,
}
