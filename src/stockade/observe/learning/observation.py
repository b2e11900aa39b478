"""Sort what an observed run tried: what walls refused, what was executed, and where it wanted to connect."""

from __future__ import annotations

from stockade.observe.access import Action
from stockade.observe.answers import answer
from stockade.observe.learning.hosts import SYNTHETIC
from stockade.observe.learning.paths import MOST_ACCESSES
from stockade.observe.learning.rounds import LearningRun
from stockade.observe.records import Observations
from stockade.observe.view import Walls
from stockade.resolve.toolchain.needs import which
from stockade.result import Result

#: The most directories above a path that is looked at: a program can make it as deep as it likes.
DEEPEST = 64


def sort_observed(observed: Observations, walls: Walls, result: Result, command: str) -> LearningRun:
    """Return what a run showed; at most `MOST_ACCESSES` that failed are looked at.

    `command` is the first word of the command, which Stockade itself executes, unobserved.
    """
    done = observed.changed()
    failed = [
        one
        for one in observed.accesses
        # What succeeded in the end was only early: a directory that the program then made, for example.
        if one.error and one.target.count("/") <= DEEPEST and (one.other or one.target) not in done
    ]
    refused = [found for one in failed[:MOST_ACCESSES] if not (found := answer(one, walls)).allowed]
    left = (
        f"{len(failed) - MOST_ACCESSES} failed accesses were not looked at" if failed[MOST_ACCESSES:] else ""
    )
    connects = [found.access for found in refused if found.access.action is Action.CONNECT]
    connects += [
        access
        for access in observed.accesses
        if access.action is Action.CONNECT and access.target.lstrip("[").startswith(SYNTHETIC)
    ]
    programs = [access for access in observed.accesses if access.action is Action.EXECUTE]
    first = command if command.startswith("/") else which(command, walls.resolved.environ["PATH"], "/")[0]
    executed = [first, *(one.target for one in programs if not one.error)]
    executed += [one.program for one in observed.accesses]
    return LearningRun(
        result,
        tuple(refused),
        tuple(connects),
        tuple(dict.fromkeys(path for path in executed if path.startswith("/"))),
        tuple(dict.fromkeys(one.target for one in programs if one.error)),
        "; ".join(filter(None, (observed.cut, left))),
    )
