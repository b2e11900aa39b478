"""`Board`: everything that the screen of a loop shows, made of the loop's events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stockade.linux.plain_text import clean_line
from stockade.loop import events
from stockade.loop.events import DiffStat, HeldFile, ItemSummary, Phase, Spending

#: How many lines of an attempt's output the screen keeps; its log has all of them.
MOST_LINES = 2000
MOST_DECISIONS = 500


class Tail:
    """The last lines of an output, and how many there have been."""

    def __init__(self, most: int = MOST_LINES) -> None:
        self._lines: deque[str] = deque(maxlen=most)
        self.total = 0

    def add(self, text: str) -> None:
        self._lines.append(clean_line(text))
        self.total += 1

    def since(self, seen: int) -> list[str]:
        """Return the lines after the first `seen`, as far as they are kept."""
        new = self.total - seen
        return list(self._lines)[-new:] if new > 0 else []


class AttemptView:
    """One attempt as the screen shows it."""

    def __init__(self, number: int, of: int = 0) -> None:
        self.number, self.of = number, of
        self.outcome, self.reason = "", ""
        self.used, self.diff = Spending(), DiffStat()
        self.output, self.judge, self.decisions = Tail(), Tail(), Tail(MOST_DECISIONS)


class ItemView:
    """One item as the screen shows it."""

    def __init__(self, id: str, title: str, phase: Phase = "waiting") -> None:
        self.id, self.title, self.phase = id, title, phase
        self.reason, self.workspace = "", ""
        self.earlier = 0
        self.used, self.diff = Spending(), DiffStat()
        self.held: tuple[HeldFile, ...] = ()
        self.attempts: dict[int, AttemptView] = {}

    @property
    def count(self) -> int:
        """How many attempts it has had."""
        return max((self.earlier, *self.attempts))

    def latest(self) -> AttemptView | None:
        return self.attempts[max(self.attempts)] if self.attempts else None


class Board:
    """The items, their attempts and the state of the loop; `apply` folds one more event into it."""

    def __init__(self, items: Iterable[ItemSummary] = ()) -> None:
        self.items: dict[str, ItemView] = {}
        self.agent = self.backend = ""
        self.mechanisms: dict[str, str] = {}
        self.doing = "looking for the walls and the agent"
        self.used = Spending()
        self.end: events.LoopEnd | None = None
        #: Messages for the user, one line each, that nobody has shown yet: text and severity.
        self.messages: list[tuple[str, str]] = []
        self._summarize(items)

    def _summarize(self, items: Iterable[ItemSummary]) -> None:
        for one in items:
            view = self.items.setdefault(one.item, ItemView(one.item, clean_line(one.title)))
            view.title, view.phase, view.reason = clean_line(one.title), one.phase, clean_line(one.reason)
            view.earlier, view.used, view.diff = one.attempts, one.spending, one.diff
            view.held, view.workspace = one.held, one.workspace

    def say(self, text: str, severity: str = "information") -> None:
        """Leave a message for the user, on one line."""
        self.messages.append((clean_line(text.strip())[:300], severity))

    def begin(self) -> None:
        """Note that the loop is started."""
        self.end = None
        self.doing = "looking for the walls and the agent"

    def fail(self, message: str) -> None:
        """Note that the loop could not go on."""
        self.doing = "stopped"
        self.say(message, "error")

    def _item(self, id: str, title: str = "") -> ItemView:
        return self.items.setdefault(id, ItemView(id, clean_line(title or id)))

    def _attempt(self, id: str, number: int) -> AttemptView:
        item = self._item(id)
        return item.attempts.setdefault(number, AttemptView(number))

    def apply(self, event: events.LoopEvent) -> None:
        """Fold one event into the board."""
        match event:
            case events.LoopStart():
                self.agent = clean_line(event.shown_agent)
                self.backend, self.mechanisms = event.backend, event.mechanisms
                self.doing = "running"
                self._summarize(event.items)
            case events.BaselineStart():
                self.doing = "taking the baseline"
            case events.BaselineEnd():
                self.doing = "running"
                found = f"{event.passed} passed, {event.failed} failed" if event.reported else "no report"
                self.say(f"baseline: exit code {event.exit_code}, {found}")
            case events.PauseRequest():
                self.doing = "pausing when the attempt is over"
            case events.RateLimitWait():
                self.say(f"{event.item}: {event.reason}; waiting {event.seconds:.0f} seconds", "warning")
            case events.SandboxFailure():
                self.fail(f"{event.message} (details: {event.log})")
            case events.LoopWarning():
                self.say(event.text, "warning")
            case events.LoopEnd():
                self.end, self.doing, self.used = event, event.outcome, event.spending
                self._summarize(event.items)
            case _:
                self._apply_to_item(event)

    def _apply_to_item(self, event: events.LoopEvent) -> None:
        match event:
            case events.ItemStart():
                self._item(event.item, event.title).phase = "running"
            case events.ItemChange():
                item = self._item(event.item)
                item.title, item.phase = clean_line(event.title), event.phase
            case events.ItemEnd():
                item = self._item(event.item)
                item.phase, item.reason = event.phase, clean_line(event.reason)
            case events.HeldBackFiles():
                item = self._item(event.item)
                item.phase, item.held, item.workspace = "held", event.files, event.workspace
                self.say(f"{event.item}: files wait for you ({len(event.files)}): press c", "warning")
            case events.Landing():
                item = self._item(event.item)
                item.phase, item.diff = "landed", event.diff
            case _:
                self._apply_to_attempt(event)

    def _apply_to_attempt(self, event: events.LoopEvent) -> None:
        match event:
            case events.AttemptStart():
                self._item(event.item).phase = "running"
                self._attempt(event.item, event.attempt).of = event.of
            case events.AgentLine():
                self._attempt(event.item, event.attempt).output.add(event.text)
            case events.JudgeStart():
                self._item(event.item).phase = "judging"
                attempt = self._attempt(event.item, event.attempt)
                attempt.judge.add(f"$ {event.command}")
                if event.restored:
                    attempt.judge.add(f"from the base: {', '.join(event.restored[:20])}")
            case events.JudgeLine():
                self._attempt(event.item, event.attempt).judge.add(event.text)
            case events.JudgeEnd():
                verdict = "passed" if event.passed else "rejected"
                self._attempt(event.item, event.attempt).judge.add(f"{verdict}: {event.reason}")
            case events.NetworkEvent():
                one = event.decision
                words = f"{one.verdict:<8} {one.name or one.address}:{one.port} {one.reason or one.rule}"
                self._attempt(event.item, event.attempt).decisions.add(words.rstrip())
            case events.BudgetReport():
                self._attempt(event.item, event.attempt).used = event.used
                self._item(event.item).used = event.item_used
                self.used = event.loop_used
            case events.AttemptEnd():
                attempt = self._attempt(event.item, event.attempt)
                attempt.outcome, attempt.reason = event.outcome, clean_line(event.reason)
                attempt.used, attempt.diff = event.spending, event.diff
            case events.LandingConflict():
                self.say(f"{event.item}: the project changed in {', '.join(event.paths[:3])}", "warning")
