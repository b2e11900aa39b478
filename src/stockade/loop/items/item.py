"""`WorkItem`: one thing that a loop has to get done, and the order of many."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line

#: The most items of one source.
MOST_ITEMS = 10_000
#: How many ids an error lists.
MOST_NAMES = 10


class ItemsError(StockadeError):
    """The work items cannot be read, or depend on each other in a way that has no order."""


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a loop has to get done.

    `priority` orders items that do not depend on each other: lower first, equal ones in the order of the
    file. `verify` and `judge` are those of this item alone; empty ones are the loop's. `attempts` is how
    many this item gets, if it says so.
    """

    id: str
    title: str
    body: str = ""
    depends_on: tuple[str, ...] = ()
    priority: int = 0
    labels: tuple[str, ...] = ()
    verify: str = ""
    judge: tuple[str, ...] = ()
    #: Paths of the host, outside of the workspace, that the judge's sandbox shows read-only and the agent's
    #: does not: the tests of a task.
    judge_reads: tuple[str, ...] = ()
    attempts: int | None = None


def order_items(items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
    """Return the items in the order of work: dependencies first, then by priority, then as written.

    >>> [item.id for item in order_items([WorkItem(id="b", title="B", depends_on=("a",)),
    ...                                   WorkItem(id="a", title="A")])]
    ['a', 'b']
    """
    written = tuple(items)
    places = _places(written)
    waits_for = {item.id: set(item.depends_on) for item in written}
    dependents: dict[str, list[str]] = {item.id: [] for item in written}
    for item in written:
        for other in waits_for[item.id]:
            if other not in places:
                raise ItemsError(
                    f"item {_shown([item.id])} depends on {_shown([other])}, and there is no such item",
                    hint=f"the ids are {_shown(places)}; items that are done already are left out: remove "
                    "them from the dependencies too",
                )
            dependents[other].append(item.id)
    ready = [(item.priority, places[item.id]) for item in written if not waits_for[item.id]]
    heapq.heapify(ready)
    ordered: list[WorkItem] = []
    while ready:
        item = written[heapq.heappop(ready)[1]]
        ordered.append(item)
        for other in dependents[item.id]:
            waits_for[other].discard(item.id)
            if not waits_for[other]:
                heapq.heappush(ready, (written[places[other]].priority, places[other]))
    if len(ordered) < len(written):
        cycle = _find_cycle(waits_for)
        raise ItemsError(
            f"items depend on each other in a circle: {_shown(cycle, ' -> ')}",
            hint=f"remove one of these dependencies, for example that of {_shown(cycle[:1])}",
        )
    return tuple(ordered)


def _places(items: tuple[WorkItem, ...]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        if item.id in places:
            raise ItemsError(
                f"two items have the id {_shown([item.id])}: number {places[item.id] + 1} and {place + 1}",
                hint="give every item an id of its own",
            )
        places[item.id] = place
    return places


def _find_cycle(waits_for: dict[str, set[str]]) -> list[str]:
    """Return the ids of a circle, the first one again at the end; each id here waits for another one."""
    at = next(name for name, others in waits_for.items() if others)
    seen: dict[str, int] = {}
    path: list[str] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = min(waits_for[at])
    return [*path[seen[at] :], at]


def _shown(ids: Iterable[str], between: str = ", ") -> str:
    names = [clean_line(name[:80]) for name in ids]
    more = f"{between}… ({len(names)} in all)" if len(names) > MOST_NAMES else ""
    return between.join(names[:MOST_NAMES]) + more
