"""Answer "may it, and why?" from a resolved policy: for files, hosts and system calls.

The answers to what a program tried are judgements: the error that it got must be one that the wall gives, so
that a refusal that has nothing to do with the sandbox is never blamed on it.
"""

from __future__ import annotations

import msgspec

from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.call_answers import answer_call
from stockade.observe.file_answers import answer_file
from stockade.observe.network_answers import answer_network
from stockade.observe.view import Walls
from stockade.resolve.provenance import place_of


def answer(access: Access, walls: Walls) -> Answer:
    """Return whether a program may do something or, if it failed, whether a wall refused it."""
    if access.action in (Action.CALL, Action.MOUNT):
        found = answer_call(access, walls)
    elif access.action in (Action.CONNECT, Action.BIND):
        found = answer_network(access, walls)
    else:
        found = answer_file(access, walls)
    place = place_of(found.clause, walls.sources)
    return msgspec.structs.replace(found, place=place) if place else found
