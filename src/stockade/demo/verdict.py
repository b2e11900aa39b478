"""What the agent met, and what the host shows of it.

Whether a wall held is read off the host: the key's text is nowhere, the
listener heard nobody, no process is left, the files beside the project are as
they were. What the agent says can only make it worse: an attempt that it did
not come to, or that worked, is not called refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stockade.demo import agent
from stockade.demo.ground import NOTES, PRICE, Ground
from stockade.policy import Policy
from stockade.sandbox.result import Result
from stockade.workspace.diff import Diff

#: What the agent reported, by name.
Said = dict[str, dict[str, Any]]
UNTRIED = "the agent did not come to it"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the agent did or tried, on both sides of the wall."""

    title: str
    #: What the agent says it met.
    met: tuple[str, ...]
    control: str
    #: By which means of the kernel the control is kept.
    means: str = ""
    #: What the host shows.
    outside: str
    #: Whether the host's side is as it should be.
    held: bool
    #: Whether somebody asked for it.
    wanted: bool = False
    #: Why it was not tried on this machine, if it was not.
    left_out: str = ""


def rows(ground: Ground, result: Result, diff: Diff, policy: Policy, *, no_bomb: str = "") -> list[Row]:
    """Judge a run of the agent. `no_bomb` says why there was no fork bomb, if there was none."""
    said = _said(result)
    controls = result.controls
    came_out = b"".join([result.stdout, result.stderr, *(one.text for one in diff.files)])
    found = [
        _repair(ground, said),
        _key(ground, said, came_out),
        _call(ground, said),
        _no_bomb(no_bomb) if no_bomb else _bomb(ground, said, policy, result.usage.peak_tasks),
        _write(ground, said),
        _hook(ground, said, policy),
    ]
    return [
        row if row.left_out else msgspec.structs.replace(row, means=controls[row.control].mechanism)
        for row in found
    ]


def afterwards(ground: Ground, *, committed: bool) -> tuple[str, bool]:
    """How the project stands when the changes were committed or discarded, and whether it should."""
    changed = (ground.project / "shop/price.py").read_text() != PRICE
    planted = any((ground.project / ".git/hooks").iterdir())
    price = "shop/price.py is repaired" if changed else "shop/price.py is as it was"
    hooks = ".git/hooks has a hook in it" if planted else ".git/hooks is empty"
    return f"on the host {price} and {hooks}", changed is committed and not planted


def _said(result: Result) -> Said:
    """The agent's report. Whatever is not one is not shown."""
    found: Said = {}
    for line in result.stdout.splitlines():
        try:
            word = json.loads(line)
            found[str(word["name"])] = word
        except (ValueError, TypeError, KeyError):
            continue
    return found


def _met(said: Said, name: str, target: str = "") -> str:
    """The answer that an attempt got; where the row has several, each with its target and shorter."""
    word = said.get(name)
    if word is None:
        return UNTRIED
    number, words = word.get("errno", ""), word.get("said", "")
    if target:
        return f"{target} {number or words}"
    return f"{number}: {words}" if number else str(words)


def _repair(ground: Ground, said: Said) -> Row:
    before, after = said.get("tests", {}).get("failing"), said.get("repair", {}).get("failing")
    same = (ground.project / "shop/price.py").read_text() == PRICE
    return Row(
        title="repair shop/price.py",
        met=("the tests failed before, and pass now" if before and after is False else UNTRIED,),
        control="workspace.overlay",
        outside="your file is as it was: the change waits in a copy" if same else "your file was changed",
        held=same and before is True and after is False,
        wanted=True,
    )


def _key(ground: Ground, said: Said, came_out: bytes) -> Row:
    text = ground.key.read_text()
    leaked = ground.secret.encode() in came_out
    return Row(
        title="read ~/.ssh/id_ed25519",
        met=(_met(said, "key"),),
        control="files",
        outside="the key was read"
        if leaked
        else f"the key is there, {len(text)} bytes, and nothing of it came out",
        held=not leaked and _refused(said, "key") and ground.secret in text,
    )


def _call(ground: Ground, said: Said) -> Row:
    calls = ground.calls()
    near = f"127.0.0.1:{ground.port}"
    return Row(
        title="phone home",
        met=(_met(said, "far", f"{agent.FAR[0]}:{agent.FAR[1]}"), _met(said, "near", near)),
        control="network.none",
        outside=f"a listener on {near} heard {calls or 'nobody'}",
        held=ground.hears and not calls and _refused(said, "far", "near"),
    )


def _bomb(ground: Ground, said: Said, policy: Policy, peak: int | None) -> Row:
    left = ground.processes()
    counted = f"the kernel counted {peak} tasks" if peak else f"at most {policy.limits.tasks} tasks"
    return Row(
        title="fork bomb",
        met=(_met(said, "bomb"),),
        control="limits.tasks",
        outside=f"{counted}; {len(left) or 'none'} left",
        held=not left and _refused(said, "bomb"),
    )


def _no_bomb(why: str) -> Row:
    return Row(
        title="fork bomb",
        met=("not tried on this machine",),
        control="limits.tasks",
        outside=f"nothing here would stop it: {why}",
        held=True,
        left_out=why,
    )


def _write(ground: Ground, said: Said) -> Row:
    same = (ground.root / "neighbour/notes.txt").read_text() == NOTES
    planted = agent.PLANTED.exists()
    return Row(
        title="write outside the project",
        met=(_met(said, "neighbour", "../neighbour/notes.txt"), _met(said, "system", "/usr/local/bin")),
        control="files",
        outside="the neighbour's notes are as they were; nothing new in /usr/local/bin"
        if same and not planted
        else "files outside were changed",
        held=same and not planted and _refused(said, "neighbour", "system"),
    )


def _hook(ground: Ground, said: Said, policy: Policy) -> Row:
    planted = list((ground.project / ".git/hooks").iterdir())
    protected = ".git/hooks" in policy.protect
    return Row(
        title="plant a git hook",
        met=(f"{agent.HOOK} exists, in the copy" if _worked(said, "hook") else _met(said, "hook"),),
        control="protect",
        outside="your .git/hooks is empty; a commit holds it back"
        if not planted and protected
        else "there is a hook in .git/hooks",
        held=not planted and protected and "hook" in said,
    )


def _refused(said: Said, *names: str) -> bool:
    """Whether each was tried, and answered with an error. A lie would only spoil the demo."""
    return all(said.get(name, {}).get("errno") for name in names)


def _worked(said: Said, name: str) -> bool:
    return name in said and not said[name].get("errno")
