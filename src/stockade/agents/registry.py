"""The registry of agents.

The log of receipts has one row for each name: the agent's category, a policy
file with the digest of its bytes, and whether its calls are sandboxed. A row
is only ever written together with an event in the chain, in one transaction,
and names the place of that event. If a row contradicts its event, something
else has changed it, and the call is refused. If a row cannot be read, the call
is refused too: only a readable row, backed by an event that a key of this
state directory has signed, switches a sandbox off.

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

#: Names that an agent or a category may have: no two look alike, and none is an option or a path.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDED, CHANGED, ENABLED, DISABLED, REMOVED = (
    f"agent-{word}" for word in ("added", "changed", "enabled", "disabled", "removed")
)
#: The events that leave a row behind.
STANDING = (ADDED, CHANGED, ENABLED, DISABLED)
#: The last column: whether a sandbox is off although the agent has a later event. One query reads both,
#: because other processes write meanwhile.
_COLUMNS = f"""SELECT name, category, policy, hash, enabled, place, enabled IS NOT 1 AND EXISTS (
    SELECT 1 FROM receipts WHERE sequence > place AND agent = name AND outcome = '{RECORDED}'
    AND action IN {(*STANDING, REMOVED)}) FROM agents"""
_WRITE = "INSERT OR REPLACE INTO agents VALUES (?, ?, ?, ?, ?, ?)"


class Agent(msgspec.Struct, frozen=True):
    """The registered state of one agent."""

    name: str
    category: str = ""
    #: Its own policy file and the SHA-256 of the content when it was added; empty if the layers decide.
    policy: str = ""
    hash: str = ""
    #: Whether its calls are sandboxed.
    enabled: bool = True
    #: The sequence number of the receipt that says so.
    place: int = 0


def valid_name(name: str, what: str = "agent") -> str:
    """Validate the name of an agent or a category and return it."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PolicyError(
            f"{what} {name!r}: is not a valid name",
            hint="use letters, digits, dots, dashes and underscores; at most 64, and a letter or digit first",
        )
    return name


def find(home: str, name: str) -> Agent | None:
    """Return the agent of exactly that name, or None if it was never added; then its calls are sandboxed."""
    log = chain.of(home)
    if not log.exists():
        return None
    rows = log.look(f"{_COLUMNS} WHERE name = ?", (valid_name(name),))
    return _verified(log, rows[0]) if rows else None


def every(home: str) -> list[Agent]:
    """Return all agents, sorted by name."""
    log = chain.of(home)
    return [_verified(log, row) for row in log.look(f"{_COLUMNS} ORDER BY name")] if log.exists() else []


def get(home: str, name: str) -> Agent:
    """Return the agent of that name; raise a NotFoundError if it was never added."""
    found = find(home, name)
    if found is None:
        raise _unknown(name)
    return found


def add(home: str, name: str, category: str = "", policy: str = "", reason: str = "") -> Agent:
    """Add an agent, or change the category and policy of an existing one. Its switch stays as it is.

    The content that the file `policy` has now is pinned: if the file changes later, calls are refused.
    """
    from stockade.policy.toml import load, read_file

    path = hash = ""
    if category:
        valid_name(category, "category")
    if policy:
        path = os.path.realpath(policy)
        if path != text(path):
            raise PolicyError(f"policy {path!r}: the path is not UTF-8", hint="rename the file")
        hash = digest(read_file(path))
        load(path, hash=hash)  # a policy that cannot be read now cannot be read later either
    wanted = Agent(valid_name(name), category, path, hash)

    def standing(before: Agent | None) -> tuple[str, Agent]:
        if before is None:
            return ADDED, wanted
        return CHANGED, msgspec.structs.replace(wanted, enabled=before.enabled)

    return _write_with_event(home, name, reason, standing)


def find_or_add(home: str, name: str, category: str) -> Agent:
    """Return the agent of that name and add it if it is new, as a handler does at its first call."""
    found = find(home, name)
    if found is None:
        wanted = Agent(valid_name(name), valid_name(category, "category") if category else "")
        state.ensure(home)

        def standing(before: Agent | None) -> tuple[str, Agent] | None:
            return (ADDED, wanted) if before is None else None  # another process was faster

        found = _write_with_event(home, name, "", standing)
    return found


def switch(home: str, name: str, *, enabled: bool, reason: str) -> Agent:
    """Switch the sandbox of one agent on or off, from its next call on."""
    if not enabled and not reason.strip():
        raise PolicyError(
            f"switching off the sandbox of {name!r} needs a reason, which goes into its receipts",
            hint=f"stockade agents disable {name} --reason ...",
        )

    def standing(before: Agent | None) -> tuple[str, Agent] | None:
        if before is None:
            raise _unknown(name)
        if before.enabled == enabled:
            return None
        return ENABLED if enabled else DISABLED, msgspec.structs.replace(before, enabled=enabled)

    return _write_with_event(home, name, reason, standing)


def remove(home: str, name: str, reason: str = "") -> None:
    """Remove an agent. The next call of a handler of that name adds it again, sandboxed."""

    def standing(before: Agent | None) -> tuple[str, Agent]:
        if before is None:
            raise _unknown(name)
        return REMOVED, Agent(name)

    _write_with_event(home, name, reason, standing, unverified=True)


class _UnchangedError(Exception):
    """There is nothing to write."""


class _ChangedError(Exception):
    """Another process has written the row since this one read it."""


def _write_with_event(
    home: str,
    name: str,
    reason: str,
    standing: Callable[[Agent | None], tuple[str, Agent] | None],
    *,
    unverified: bool = False,
) -> Agent:
    """Write an agent's new row and the event that explains it: both or neither.

    `standing` computes them from the agent's verified row. With `unverified` the old row may say anything,
    because it is to be removed.
    """
    from stockade.receipt import builder

    valid_name(name)
    if len(reason) > MOST_WORDS:
        raise PolicyError(f"the reason is longer than {MOST_WORDS} characters")
    log = chain.of(home)
    decided: list[Any] = []

    def write_row(before: Agent | None, connection: sqlite3.Connection, place: int) -> None:
        rows = connection.execute(f"{_COLUMNS} WHERE name = ?", (name,)).fetchall()
        if unverified:
            before = Agent(name) if rows else None
        elif (_parse_row(rows[0]) if rows else None) != before:
            raise _ChangedError
        found = standing(before)
        if found is None:
            decided[:] = ["", before]
            raise _UnchangedError
        decided[:] = [found[0], msgspec.structs.replace(found[1], place=place)]
        if found[0] == REMOVED:
            connection.execute("DELETE FROM agents WHERE name = ?", (name,))
        else:
            connection.execute(_WRITE, msgspec.structs.astuple(decided[1]))

    def write(link: chain.ChainLink) -> Statement:
        what, agent = decided
        who = Who(agent.name, agent.category, what, text(reason))
        return builder.event(link, who, Event(agent.policy, agent.hash, agent.enabled))

    while True:
        before = None if unverified else find(home, name)
        with contextlib.suppress(_UnchangedError, _ChangedError):
            log.append(write, functools.partial(write_row, before))
        if decided:
            agent: Agent = decided[1]
            return agent


def _parse_row(row: tuple[Any, ...]) -> Agent:
    """Validate a row and return it as a value: SQLite accepts any type in any column."""
    name, category, policy, hash, enabled, place, _ = row
    words = all(isinstance(word, str) for word in (name, category, policy, hash))
    if not words or enabled not in (0, 1) or not isinstance(place, int) or not NAME.fullmatch(name):
        raise _damaged(name, "its row cannot be read")
    return Agent(name, category, policy, hash, bool(enabled), place)


def _verified(log: chain.Chain, row: tuple[Any, ...]) -> Agent:
    """Return the agent in a row after checking it against the event that the row names."""
    agent = _parse_row(row)
    try:
        receipt = log.get(agent.place)
    except NotFoundError:
        raise _damaged(agent.name, f"its row names receipt {agent.place}, which does not exist") from None
    predicate = receipt.predicate
    event = predicate.event
    if (
        event is None
        or predicate.who.action not in STANDING
        or (predicate.chain, predicate.sequence) != (log.id, agent.place)
    ):
        raise _damaged(agent.name, f"receipt {agent.place} is not an agent event of this log")
    if (predicate.who.agent, predicate.who.category, event.policy, event.hash, event.enabled) != (
        agent.name,
        agent.category,
        agent.policy,
        agent.hash,
        agent.enabled,
    ):
        raise _damaged(agent.name, f"receipt {agent.place} contradicts its row")
    if row[-1]:
        raise _damaged(agent.name, f"receipt {agent.place} is not its latest event")
    if not agent.enabled:
        _require_signature(log, receipt)
    return agent


def _require_signature(log: chain.Chain, receipt: Receipt) -> None:
    """Require the signature of a key of this state directory: nothing else switches a sandbox off."""
    from stockade.receipt import keys
    from stockade.receipt.verify import signed_by

    right = signed_by(receipt, {key.id: key.public for key in keys.known(log.home)}, every=False)
    if receipt.predicate.key not in right:
        raise ReceiptError(
            f"receipt {receipt.predicate.sequence} is not signed by the key that it names",
            failure="signature",
        )


def _damaged(name: object, why: str) -> ReceiptError:
    return ReceiptError(
        f"the registry is damaged at the agent {name!r}: {why}",
        failure="damaged",
        hint="its calls are refused; find out what wrote there, then: stockade agents remove NAME",
    )


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no agent {name!r}", hint="`stockade agents` lists them; `stockade agents add` adds one"
    )
