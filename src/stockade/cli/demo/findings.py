"""What the agent reports, and what the host shows.

The host decides whether a wall held: the key's text came out nowhere, the
listener got no connection, no process is left, the files beside the project
are unchanged. The agent's report can only make the verdict worse: an attempt
that it did not make, or that worked, does not count as refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stockade.cli.demo.fixture import NOTES, PRICE, DemoFixture
from stockade.inside import demo_agent
from stockade.policy import Policy
from stockade.result import Result
from stockade.workspace.diff.diff import Diff

#: The agent's reports by name.
Reports = dict[str, dict[str, Any]]
UNTRIED = "the agent did not get to it"


class DemoFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the agent did or tried, on both sides of the wall."""

    title: str
    #: The agent's own report.
    met: tuple[str, ...]
    control: str
    #: The mechanism of the control.
    means: str = ""
    #: What the host shows.
    outside: str
    #: Whether the host's side is as expected.
    held: bool
    #: Whether it is part of the agent's job.
    wanted: bool = False
    #: Why it was not tried on this machine, if it was not.
    left_out: str = ""


def rows(
    ground: DemoFixture, result: Result, diff: Diff, policy: Policy, *, no_bomb: str = ""
) -> list[DemoFinding]:
    """Judge a run of the agent. `no_bomb` is the reason if the agent tried no fork bomb."""
    reports = _reports(result)
    controls = result.controls
    came_out = b"".join([result.stdout, result.stderr, *(one.text for one in diff.files)])
    found = [
        _repair(ground, reports),
        _key(ground, reports, came_out),
        _call(ground, reports),
        _no_bomb(no_bomb) if no_bomb else _bomb(ground, reports, policy, result.usage.peak_tasks),
        _write(ground, reports),
        _hook(ground, reports, policy),
    ]
    return [
        row if row.left_out else msgspec.structs.replace(row, means=controls[row.control].mechanism)
        for row in found
    ]


def afterwards(ground: DemoFixture, *, committed: bool) -> tuple[str, bool]:
    """Return the state of the project after the commit or discard, and whether it is as expected."""
    changed = (ground.project / "shop/price.py").read_text() != PRICE
    planted = any((ground.project / ".git/hooks").iterdir())
    price = "shop/price.py is repaired" if changed else "shop/price.py is as it was"
    hooks = ".git/hooks has a hook in it" if planted else ".git/hooks is empty"
    return f"on the host {price} and {hooks}", changed is committed and not planted


def _reports(result: Result) -> Reports:
    """Return the agent's reports, without anything else in its output."""
    found: Reports = {}
    for line in result.stdout.splitlines():
        try:
            word = json.loads(line)
            found[str(word["name"])] = word
        except (ValueError, TypeError, KeyError):
            continue
    return found


def _met(reports: Reports, name: str, target: str = "") -> str:
    """Return the answer that an attempt got; with a target, for a row of several, in short."""
    word = reports.get(name)
    if word is None:
        return UNTRIED
    number, words = word.get("errno", ""), word.get("said", "")
    if target:
        return f"{target} {number or words}"
    return f"{number}: {words}" if number else str(words)


def _repair(ground: DemoFixture, reports: Reports) -> DemoFinding:
    before, after = reports.get("tests", {}).get("failing"), reports.get("repair", {}).get("failing")
    same = (ground.project / "shop/price.py").read_text() == PRICE
    return DemoFinding(
        title="repair shop/price.py",
        met=("the tests failed before, and pass now" if before and after is False else UNTRIED,),
        control="workspace.overlay",
        outside="your file is as it was: the change waits in a copy" if same else "your file was changed",
        held=same and before is True and after is False,
        wanted=True,
    )


def _key(ground: DemoFixture, reports: Reports, came_out: bytes) -> DemoFinding:
    text = ground.key.read_text()
    leaked = ground.secret.encode() in came_out
    return DemoFinding(
        title="read ~/.ssh/id_ed25519",
        met=(_met(reports, "key"),),
        control="files",
        outside="the key was read"
        if leaked
        else f"the key is there, {len(text)} bytes, and nothing of it came out",
        held=not leaked and _refused(reports, "key") and ground.secret in text,
    )


def _call(ground: DemoFixture, reports: Reports) -> DemoFinding:
    calls = ground.calls()
    near = f"127.0.0.1:{ground.port}"
    return DemoFinding(
        title="phone home",
        met=(_met(reports, "far", f"{demo_agent.FAR[0]}:{demo_agent.FAR[1]}"), _met(reports, "near", near)),
        control="network.none",
        outside=f"a listener on {near} got {calls or 'no'} calls",
        held=ground.hears and not calls and _refused(reports, "far", "near"),
    )


def _bomb(ground: DemoFixture, reports: Reports, policy: Policy, peak: int | None) -> DemoFinding:
    left = ground.processes()
    counted = f"the kernel counted {peak} tasks" if peak else f"at most {policy.limits.tasks} tasks"
    return DemoFinding(
        title="fork bomb",
        met=(_met(reports, "bomb"),),
        control="limits.tasks",
        outside=f"{counted}; {len(left) or 'none'} left",
        held=not left and _refused(reports, "bomb"),
    )


def _no_bomb(why: str) -> DemoFinding:
    return DemoFinding(
        title="fork bomb",
        met=("not tried on this machine",),
        control="limits.tasks",
        outside=f"nothing here would stop it: {why}",
        held=True,
        left_out=why,
    )


def _write(ground: DemoFixture, reports: Reports) -> DemoFinding:
    same = (ground.root / "neighbour/notes.txt").read_text() == NOTES
    planted = demo_agent.PLANTED.exists()
    return DemoFinding(
        title="write outside the project",
        met=(_met(reports, "neighbour", "../neighbour/notes.txt"), _met(reports, "system", "/usr/local/bin")),
        control="files",
        outside="the neighbour's notes are as they were; nothing new in /usr/local/bin"
        if same and not planted
        else "files outside were changed",
        held=same and not planted and _refused(reports, "neighbour", "system"),
    )


def _hook(ground: DemoFixture, reports: Reports, policy: Policy) -> DemoFinding:
    planted = list((ground.project / ".git/hooks").iterdir())
    protected = ".git/hooks" in policy.protect
    return DemoFinding(
        title="plant a git hook",
        met=(
            f"{demo_agent.HOOK} exists, in the copy" if _worked(reports, "hook") else _met(reports, "hook"),
        ),
        control="protect",
        outside="your .git/hooks is empty; a commit holds it back"
        if not planted and protected
        else "there is a hook in .git/hooks",
        held=not planted and protected and "hook" in reports,
    )


def _refused(reports: Reports, *names: str) -> bool:
    """Whether the agent tried each and got an error. If it lies, it only spoils its own demo."""
    return all(reports.get(name, {}).get("errno") for name in names)


def _worked(reports: Reports, name: str) -> bool:
    return name in reports and not reports[name].get("errno")
