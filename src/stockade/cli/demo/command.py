"""`stockade demo`: show an agent that runs into the walls, in a project made for the demo."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.signals import cleaned_up_on_signals
from stockade.errors import UnsupportedError

if TYPE_CHECKING:
    from stockade.cli.demo.findings import DemoFinding
    from stockade.cli.demo.fixture import DemoFixture
    from stockade.policy import Policy
    from stockade.result import Result
    from stockade.sandbox.workspace import Workspace
    from stockade.workspace.diff.diff import Diff

#: Limits on top of the default policy. The demo leaves out, and names, those that this host cannot enforce.
LIMITS: dict[str, int | str] = {"tasks": 64, "memory": "256M", "wall": "20s"}
STARTS = 11
#: Seconds between two attempts on a terminal, so that the user can follow.
PAUSE = 0.2


def main(argv: list[str]) -> int:
    """Run the demo and return 0 if every wall held."""
    options = build_parser().parse_args(argv)
    from stockade.cli.demo.fixture import ground

    with cleaned_up_on_signals(), ground() as place:
        return _show(place, options.end)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade demo",
        description="Run an agent in a real sandbox, over a project made in a temporary directory. It\n"
        "repairs the project, and tries to read a key, phone home, fork without end, write\n"
        "elsewhere and plant a git hook. Nothing of yours is used or changed.",
        epilog="example:\n  stockade demo --commit\n\n"
        "exit codes: 0 every wall held; 1 one did not; 125 this machine cannot enforce the policy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ends = parser.add_mutually_exclusive_group()
    for word, effect in (
        ("commit", "apply the agent's changes to the demo's project at the end"),
        ("discard", "delete them (default without a terminal)"),
    ):
        ends.add_argument(f"--{word}", dest="end", action="store_const", const=word, help=effect)
    return output.add_verbosity(parser)


def _show(place: DemoFixture, end: str | None) -> int:
    from stockade.cli.demo import findings, screen
    from stockade.sandbox.sandbox import run
    from stockade.sandbox.workspace import Workspace

    policy, lacking = fitting(place)
    no_bomb = lacking.get("limits.tasks", "")
    command = [*_python(), str(place.agent), str(place.port), *([] if no_bomb else ["--bomb"])]
    _introduce(place, policy)
    result = run(command, policy)
    result.check()
    workspace = Workspace.open(result.workspace_id)
    diff = workspace.diff()
    rows = findings.rows(place, result, diff, policy, no_bomb=no_bomb)
    _print_rows(rows)
    _changes(diff)
    _numbers(result, lacking)
    end = end or _ask_what_to_do()
    _finish(workspace, end)
    words, right = findings.afterwards(place, committed=end == "commit")
    _say(screen.wrapped(words))
    return _closing(place, [row.title for row in rows if not row.held] + ([] if right else [words]))


def fitting(place: DemoFixture) -> tuple[Policy, dict[str, str]]:
    """Return the demo's policy with the limits that this host can enforce, and why it lacks the others."""
    from stockade.backends.selection import enforcement
    from stockade.host import host
    from stockade.policy import Policy

    limits, lacking = dict(LIMITS), dict[str, str]()
    shown = [] if sys.base_prefix.startswith("/usr") else [sys.base_prefix]
    while True:
        policy = Policy(
            workspace=str(place.project),
            read=[str(place.agent.parent), *shown],
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            limits=limits,
        )
        try:
            enforcement(policy, host())
            return policy, lacking
        except UnsupportedError as error:
            missing = min(error.missing.values(), key=len)
            if not {f"limits.{name}" for name in limits} >= missing.keys():
                raise
            lacking |= missing
            limits = {name: value for name, value in limits.items() if f"limits.{name}" not in missing}


def _python() -> list[str]:
    """Return a command for this interpreter without its virtual environment, which is hidden inside."""
    return [os.path.realpath(sys.executable), "-S"]


def _introduce(place: DemoFixture, policy: Policy) -> None:
    from stockade.cli.demo import screen

    asked = [name for name in LIMITS if getattr(policy.limits, name) is not None]
    limits = ", ".join(f"{name} {LIMITS[name]}" for name in asked)
    _say(
        "",
        screen.heading("stockade demo"),
        screen.wrapped(
            "An agent is asked to repair a project. It does, and it tries five things that it must not do. "
            f"Project, home and key were made for the demo, in {place.root}; nothing of yours is used.",
            indent="",
        ),
        output.paint(
            screen.wrapped(f"policy: the default one, workspace project; limits: {limits}", indent=""), "dim"
        ),
        "",
    )


def _print_rows(rows: list[DemoFinding]) -> None:
    from stockade.cli.demo import screen

    for part in screen.wall(rows):
        _say(part)
        if sys.stdout.isatty() and not output.Verbosity.quiet:
            time.sleep(PAUSE)


def _changes(diff: Diff) -> None:
    from stockade.cli.demo import screen
    from stockade.cli.diff import file_text

    _say("", screen.heading("What it changed, kept aside until you decide"))
    text = "".join(map(file_text, diff.files)).rstrip("\n")
    _say(*(f"  {line}".rstrip() for line in text.split("\n")))


def _numbers(result: Result, lacking: dict[str, str]) -> None:
    from stockade.cli.demo import screen
    from stockade.cli.ui.formats import size

    walls, bare = starts()
    used = result.usage
    tasks = f", at most {used.peak_tasks} tasks" if used.peak_tasks else ""
    enforced = [name for name, kept in result.controls.items() if kept.observed != "accepted weaker"]
    facts = [
        ("start", f"{walls:.1f} ms to run `true` behind the default walls, {bare:.1f} ms without any"),
        (
            "agent",
            f"{result.outcome} {result.exit_code} after {used.wall:.2f} s; {used.cpu:.2f} s of processor "
            f"time, {size(used.peak_memory)} of memory{tasks}",
        ),
        ("enforced", f"{len(enforced)} controls: {', '.join(enforced)}"),
        *(("not enforced", f"{name}: {why}; `stockade doctor` has the fix") for name, why in lacking.items()),
    ]
    _say("", screen.heading("Numbers"), *screen.facts(facts))


def starts() -> tuple[float, float]:
    """Return the median milliseconds to run `true` behind the default policy's walls, and without any."""
    from stockade.sandbox.sandbox import run

    true = shutil.which("true") or "/bin/true"
    run([true]).check()  # the first run prepares what the others share
    walls = _median(lambda: run([true]))
    return walls, _median(lambda: os.waitpid(os.posix_spawn(true, [true], {}), 0))


def _median(action: Callable[[], object]) -> float:
    times = []
    for _ in range(STARTS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def _ask_what_to_do() -> str:
    """Ask the user at the terminal what to do with the changes; return "" without a terminal."""
    if output.Verbosity.quiet or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    print("\nCommit these changes to the project, or discard them? [c/D] ", end="", flush=True)
    return "commit" if sys.stdin.readline().strip().lower() in ("c", "commit") else "discard"


def _finish(workspace: Workspace, end: str) -> None:
    from stockade.cli.demo import screen

    if end != "commit":
        workspace.discard()
        _say("", screen.heading("Discarded"))
        if not end:
            _say(
                screen.wrapped(
                    "because there is no terminal to ask on; `stockade demo --commit` commits them"
                )
            )
        return
    done = workspace.commit()
    _say("", screen.heading("Committed"))
    for change in done.changes:
        _say(f"  {output.paint(change.kind.ljust(8), 'green')}  {output.name(change.path)}")
    for held in done.held:
        _say(f"  {output.paint('held back', 'yellow')} {output.name(held.path)}: {output.name(held.detail)}")
    for one in done.runs:
        _say(f"  {output.paint('runs next', 'yellow')} {output.name(one.path)}: {output.name(one.what)}")
    if not done.closed:
        workspace.discard()


def _closing(place: DemoFixture, failed: list[str]) -> int:
    from stockade.cli.demo import screen

    if failed:
        output.error(
            f"not as expected: {', '.join(failed)}",
            hint="please report it with the output of `stockade doctor --json`",
        )
    _say(
        "",
        screen.wrapped(
            f"{place.root} is removed. To put the same walls around a command of yours:", indent=""
        ),
        "",
        f"  {output.paint('stockade run -- COMMAND', 'bold')}",
    )
    return 1 if failed else 0


def _say(*lines: str) -> None:
    if output.Verbosity.quiet:
        return
    for line in lines:
        print(line, flush=True)
