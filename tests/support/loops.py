"""Loops over a small project, whose check is a shell script that reports TAP: fast, and a judge like any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stockade.loop.events import LoopEnd, LoopEvent
from stockade.loop.items.item import WorkItem
from stockade.loop.loop import Loop, create_loop
from stockade.loop.settings import Budget, Budgets, LoopSettings
from stockade.policy.model import Policy

Kind = TypeVar("Kind", bound=LoopEvent)

#: For each name in `wanted`: whether values.sh gives it the value 1.
CHECK = """. ./values.sh
set -- $(cat tests/wanted)
echo 1..$#
for name; do
  if eval "[ \\"\\$$name\\" = 1 ]"; then echo "ok - $name"; else echo "not ok - $name"; bad=1; fi
done
exit ${bad:-0}
"""
VERIFY = "sh tests/check.sh"
#: Lines between the values, so that changes to two of them can be merged.
SPACE = "# 1\n# 2\n# 3\n# 4\n"


def make_project(place: Path, names: Sequence[str] = ("a", "b"), good: Sequence[str] = ("b",)) -> Path:
    """Make a project in which some values are right and the others are not yet."""
    place.mkdir()
    (place / "tests").mkdir()
    (place / "values.sh").write_text(SPACE.join(f"{name}={int(name in good)}\n" for name in names))
    (place / "tests/check.sh").write_text(CHECK)
    (place / "tests/wanted").write_text(" ".join(names))
    (place / "untracked.txt").write_text("no git here\n")
    return place


def right(name: str) -> str:
    """Return the shell command that does the work."""
    return f"sed -i s/^{name}=0/{name}=1/ values.sh"


class LoopRun:
    """A loop, its events so far, and how it ended."""

    def __init__(self, loop: Loop, on_event: Callable[[LoopEvent], object] | None = None) -> None:
        self.loop = loop
        self.events: list[LoopEvent] = []
        self._on_event = on_event
        self.end: LoopEnd | None = None
        loop.listen(self._take)

    def _take(self, event: LoopEvent) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def run(self) -> LoopEnd:
        self.end = self.loop.run()
        return self.end

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def phases(self) -> dict[str, str]:
        return {one.item.id: one.phase for one in self.loop.record.items}

    def outcomes(self, item: str) -> list[str | None]:
        return [attempt.outcome for attempt in self.loop.record.find(item).attempts]

    def reasons(self, item: str) -> list[str]:
        return [attempt.reason for attempt in self.loop.record.find(item).attempts]


def make_loop(
    project: Path,
    agent: str | Sequence[str],
    items: Sequence[WorkItem] = (WorkItem(id="a", title="Set a"),),
    *,
    on_event: Callable[[LoopEvent], object] | None = None,
    policy: dict[str, Any] | None = None,
    budget: dict[str, dict[str, float]] | None = None,
    **settings: Any,
) -> LoopRun:
    """Make a loop whose agent is a shell script, or a command."""
    command = ("sh", "-c", agent) if isinstance(agent, str) else tuple(agent)
    scopes = {name: Budget(**part) for name, part in (budget or {}).items()}  # type: ignore[arg-type]
    given = {"verify": VERIFY, "judge": ("tests",), "report": "stdout", **settings}
    made = LoopSettings(agent=command, budget=Budgets(**scopes), **given)
    wanted = Policy(**{"workspace": str(project), **(policy or {})})
    return LoopRun(create_loop(made, items, wanted, str(project)), on_event)


def run_loop(project: Path, agent: str | Sequence[str], *words: Any, **options: Any) -> LoopRun:
    """Make such a loop and run it to its end."""
    made = make_loop(project, agent, *words, **options)
    made.run()
    return made
