"""Which agents there are, and how each of them stands.

One row for each name, in the log of receipts: its category, a policy file with
the digest of its bytes, and whether its calls are sandboxed. A row is only
ever written together with an event in the chain, in one transaction, and
names the place of that event; a row that says something else than its event
was changed by somebody else, and is refused. Whoever cannot read a row
refuses the call: nothing but a row that was read, and an event that a key of
this state directory has signed, switches a sandbox off.

Rows are read at each call, so that a switch takes effect at once and in every
process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stockade import state
from stockade.errors import NotFoundError, PolicyError, ReceiptError
from stockade.receipt import chain
from stockade.receipt.statement import MOST_WORDS, RECORDED, Event, Receipt, Statement, Who, digest, text

if TYPE_CHECKING:
    import sqlite3

#: What an agent, or a category, may be called: no two names look alike, and none is an option or a path.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDED, CHANGED, ENABLED, DISABLED, REMOVED = (
    f"agent-{word}" for word in ("added", "changed", "enabled", "disabled", "removed")
)
#: What makes a row.
STANDING = (ADDED, CHANGED, ENABLED, DISABLED)
#: With whether a later event is of this agent, where its sandbox is off: in one look, as others write.
_COLUMNS = f"""SELECT name, category, policy, hash, enabled, place, enabled IS NOT 1 AND EXISTS (
    SELECT 1 FROM receipts WHERE sequence > place AND agent = name AND outcome = '{RECORDED}'
    AND action IN {(*STANDING, REMOVED)}) FROM agents"""
_WRITE = "INSERT OR REPLACE INTO agents VALUES (?, ?, ?, ?, ?, ?)"


class Agent(msgspec.Struct, frozen=True):
    """How one agent stands."""

    name: str
    category: str = ""
    #: A policy file of its own, and the SHA-256 of what was in it; empty where the layers decide.
    policy: str = ""
    hash: str = ""
    #: Whether its calls are sandboxed.
    enabled: bool = True
    #: The receipt that says so.
    place: int = 0


def checked(name: str, what: str = "agent") -> str:
    """The name, or why it is none."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PolicyError(
            f"{what} {name!r}: is not a name",
            hint="letters, digits, dots, dashes and underscores; at most 64, and a letter or digit first",
        )
    return name


def find(home: str, name: str) -> Agent | None:
    """The agent of exactly that name; None where it was never added, so that its calls are sandboxed."""
    log = chain.of(home)
    if not log.exists():
        return None
    rows = log.look(f"{_COLUMNS} WHERE name = ?", (checked(name),))
    return _true(log, rows[0]) if rows else None


def every(home: str) -> list[Agent]:
    """Every agent, by name."""
    log = chain.of(home)
    return [_true(log, row) for row in log.look(f"{_COLUMNS} ORDER BY name")] if log.exists() else []


def get(home: str, name: str) -> Agent:
    """The agent of that name, which there must be."""
    found = find(home, name)
    if found is None:
        raise _unknown(name)
    return found


def add(home: str, name: str, category: str = "", policy: str = "", reason: str = "") -> Agent:
    """Add an agent, or give one that is there another category and policy. Its switch stays as it is.

    Of `policy`, a file, what is in it now counts; once that has changed, calls are refused.
    """
    from stockade.policy.load import load, read_file

    path = hash = ""
    if category:
        checked(category, "category")
    if policy:
        path = os.path.realpath(policy)
        if path != text(path):
            raise PolicyError(f"policy {path!r}: is not UTF-8", hint="give the file another name")
        hash = digest(read_file(path))
        load(path, hash=hash)  # a policy that cannot be read now cannot be read later either
    wanted = Agent(checked(name), category, path, hash)

    def standing(before: Agent | None) -> tuple[str, Agent]:
        if before is None:
            return ADDED, wanted
        return CHANGED, msgspec.structs.replace(wanted, enabled=before.enabled)

    return _recorded(home, name, reason, standing)


def enter(home: str, name: str, category: str) -> Agent:
    """The agent of that name, added where there is none yet: what a handler does when it is first called."""
    found = find(home, name)
    if found is None:
        wanted = Agent(checked(name), checked(category, "category") if category else "")
        state.ensure(home)

        def standing(before: Agent | None) -> tuple[str, Agent] | None:
            return (ADDED, wanted) if before is None else None  # another process was faster

        found = _recorded(home, name, "", standing)
    return found


def switch(home: str, name: str, *, enabled: bool, reason: str) -> Agent:
    """Let the calls of one agent, and of no other, be sandboxed or not. It counts from the next call on."""
    if not enabled and not reason.strip():
        raise PolicyError(
            "switching a sandbox off needs a reason, which is recorded",
            hint=f"stockade agents disable {name} --reason ...",
        )

    def standing(before: Agent | None) -> tuple[str, Agent] | None:
        if before is None:
            raise _unknown(name)
        if before.enabled == enabled:
            return None
        return ENABLED if enabled else DISABLED, msgspec.structs.replace(before, enabled=enabled)

    return _recorded(home, name, reason, standing)


def remove(home: str, name: str, reason: str = "") -> None:
    """Forget an agent. A handler of that name is added again when it is called, and is sandboxed."""

    def standing(before: Agent | None) -> tuple[str, Agent]:
        if before is None:
            raise _unknown(name)
        return REMOVED, Agent(name)

    _recorded(home, name, reason, standing, whatever=True)


class _AsItIsError(Exception):
    """There is nothing to write."""


class _ChangedError(Exception):
    """Somebody else has written the row since it was looked at."""


def _recorded(
    home: str,
    name: str,
    reason: str,
    standing: Callable[[Agent | None], tuple[str, Agent] | None],
    *,
    whatever: bool = False,
) -> Agent:
    """Write how an agent stands from now on, and the event that says so: both or neither.

    What is built on is a row that is true, unless it is to go `whatever` it says.
    """
    from stockade.receipt import making

    checked(name)
    if len(reason) > MOST_WORDS:
        raise PolicyError(f"the reason is longer than {MOST_WORDS} characters")
    log = chain.of(home)
    decided: list[Any] = []

    def write_row(before: Agent | None, connection: sqlite3.Connection, place: int) -> None:
        rows = connection.execute(f"{_COLUMNS} WHERE name = ?", (name,)).fetchall()
        if whatever:
            before = Agent(name) if rows else None
        elif (_read(rows[0]) if rows else None) != before:
            raise _ChangedError
        found = standing(before)
        if found is None:
            decided[:] = ["", before]
            raise _AsItIsError
        decided[:] = [found[0], msgspec.structs.replace(found[1], place=place)]
        if found[0] == REMOVED:
            connection.execute("DELETE FROM agents WHERE name = ?", (name,))
        else:
            connection.execute(_WRITE, msgspec.structs.astuple(decided[1]))

    def write(link: chain.Link) -> Statement:
        what, agent = decided
        who = Who(agent.name, agent.category, what, text(reason))
        return making.event(link, who, Event(agent.policy, agent.hash, agent.enabled))

    while True:
        before = None if whatever else find(home, name)
        with contextlib.suppress(_AsItIsError, _ChangedError):
            log.append(write, functools.partial(write_row, before))
        if decided:
            agent: Agent = decided[1]
            return agent


def _read(row: tuple[Any, ...]) -> Agent:
    """The row as a value; SQLite lets anything be written into any column."""
    name, category, policy, hash, enabled, place, _ = row
    words = all(isinstance(word, str) for word in (name, category, policy, hash))
    if not words or enabled not in (0, 1) or not isinstance(place, int) or not NAME.fullmatch(name):
        raise _damaged(name, "its row cannot be read")
    return Agent(name, category, policy, hash, bool(enabled), place)


def _true(log: chain.Chain, row: tuple[Any, ...]) -> Agent:
    """The agent in a row, if the event that the row names says the same of it."""
    agent = _read(row)
    try:
        receipt = log.get(agent.place)
    except NotFoundError:
        raise _damaged(agent.name, f"there is no receipt {agent.place}, which it names") from None
    said = receipt.predicate
    event = said.event
    if (
        event is None
        or said.who.action not in STANDING
        or (said.chain, said.sequence) != (log.id, agent.place)
    ):
        raise _damaged(agent.name, f"receipt {agent.place} is no decision of this log")
    if (said.who.agent, said.who.category, event.policy, event.hash, event.enabled) != (
        agent.name,
        agent.category,
        agent.policy,
        agent.hash,
        agent.enabled,
    ):
        raise _damaged(agent.name, f"receipt {agent.place} says something else of it")
    if row[-1]:
        raise _damaged(agent.name, f"receipt {agent.place} is not the last that is of it")
    if not agent.enabled:
        _signed(log, receipt)
    return agent


def _signed(log: chain.Chain, receipt: Receipt) -> None:
    """Only what a key of this state directory has signed switches a sandbox off."""
    from stockade.receipt import keys
    from stockade.receipt.verify import signed_by

    right = signed_by(receipt, {key.id: key.public for key in keys.known(log.home)}, every=False)
    if receipt.predicate.key not in right:
        raise ReceiptError("the key that it names has not signed it", failure="signature")


def _damaged(name: object, why: str) -> ReceiptError:
    return ReceiptError(
        f"the registry is damaged at the agent {name!r}: {why}",
        failure="damaged",
        hint="nothing of it is run; look who wrote there, then: stockade agents remove NAME",
    )


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no agent {name!r}", hint="`stockade agents` lists them; `stockade agents add` adds one"
    )
