"""`LoopApp`: the screen of a loop. It reads the board and calls the loop; it decides nothing."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Static, TabbedContent, TabPane
from textual.widgets.data_table import ColumnKey

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line
from stockade.loop.events import Spending
from stockade.loop.settings import Budget
from stockade.loop.tui.board import AttemptView, Board, ItemView, Tail
from stockade.loop.tui.control import LoopControl
from stockade.loop.tui.dialogs import ItemEditor, Question, Reader
from stockade.loop.tui.event_queue import EventQueue

#: How often the screen takes the loop's events, in seconds.
TICK = 0.1
_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▶", "cyan"),
    "judging": ("?", "cyan"),
    "landing": ("»", "cyan"),
    "landed": ("✓", "green"),
    "held": ("!", "yellow"),
    "failed": ("✗", "red"),
    "skipped": ("-", "dim"),
}
_COLUMNS = ("phase", "item", "title", "tries", "time", "cost")
#: The titles have the rest.
_WIDTHS = {"phase": 9, "item": 12, "tries": 5, "time": 6, "cost": 7}
#: The tabs that show lines, and which tail of an attempt each has.
_TAILS: dict[str, Callable[[AttemptView], Tail]] = {
    "output": lambda attempt: attempt.output,
    "judge": lambda attempt: attempt.judge,
    "network": lambda attempt: attempt.decisions,
}


class LoopApp(App[None]):
    """The items above, and below what the chosen attempt of the chosen item did."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "stockade loop"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "go", "Go"),
        Binding("p", "pause", "Pause"),
        Binding("k", "kill", "Kill"),
        Binding("r", "retry", "Retry"),
        Binding("s", "skip", "Skip"),
        Binding("e", "edit", "Edit"),
        Binding("d", "diff", "Diff"),
        Binding("c", "commit", "Commit"),
        Binding("left_square_bracket", "attempt(-1)", "Earlier attempt", show=False),
        Binding("right_square_bracket", "attempt(1)", "Later attempt", show=False),
        Binding("1", "tab('output')", "Output", show=False),
        Binding("2", "tab('judge')", "Judge", show=False),
        Binding("3", "tab('network')", "Network", show=False),
        Binding("4", "tab('budget')", "Budget", show=False),
        Binding("q,escape", "leave", "Quit"),
        Binding("ctrl+q,ctrl+c", "leave", "Quit", show=False, priority=True),
    ]
    CSS = """
    #head, #walls { height: 1; background: $primary-darken-2; padding: 0 1; }
    #head, #walls, #attempt { text-wrap: nowrap; text-overflow: ellipsis; }
    #head { text-style: bold; }
    #items { height: 2fr; min-height: 5; }
    #attempt { height: 1; background: $surface; padding: 0 1; }
    TabbedContent { height: 3fr; }
    TabPane { padding: 0; }
    RichLog { height: 1fr; }
    Toast { width: 78; max-width: 100%; padding: 0 1; }
    """

    def __init__(self, loop: LoopControl) -> None:
        super().__init__()
        self._queue = EventQueue()
        self.loop = loop
        loop.listen(self._queue.put)
        self.board = Board(self.loop.record.summaries())
        self._thread: threading.Thread | None = None
        #: What ended the loop's thread, until the screen has told the user.
        self._errors: list[BaseException] = []
        #: What ended the loop the last time, if it was not its own end.
        self.error: BaseException | None = None
        self._was_running = False
        self._chosen = ""
        #: The attempt that the user has chosen; 0 for the latest.
        self._number = 0
        #: What the tabs show: the item, the attempt, and how many lines of each tail.
        self._shown: tuple[str, int] = ("", 0)
        self._seen: dict[str, int] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="walls", markup=False)
        yield DataTable(id="items", cursor_type="row", zebra_stripes=True)
        yield Static(id="attempt", markup=False)
        with TabbedContent(initial="output"):
            for name in _TAILS:
                with TabPane(name.capitalize(), id=name):
                    yield RichLog(
                        id=f"{name}-lines", wrap=True, markup=False, highlight=False, max_lines=2000
                    )
            with TabPane("Budget", id="budget"):
                yield Static(id="spending", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name in _COLUMNS:
            table.add_column(name, key=name, width=_WIDTHS.get(name) or _title_width(self.size.width))
        table.focus()
        self.action_go()
        self._refresh_all()
        self.set_interval(TICK, self._take_events)

    def on_resize(self, event: Resize) -> None:
        """Give the titles the room that the other columns leave."""
        table: DataTable[Text] = self._main("#items")
        if table.columns:
            table.columns[ColumnKey("title")].width = _title_width(event.size.width)
            table.refresh(layout=True)

    # The loop's thread.

    @property
    def running(self) -> bool:
        """Whether the loop works, or is being ended."""
        return self._thread is not None and self._thread.is_alive()

    def action_go(self) -> None:
        """Start the loop, or continue it."""
        if self.running:
            return
        self.board.begin()
        self.error = None
        self._thread = threading.Thread(target=self._run_loop, name="loop", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self._errors.append(error)

    def end_loop(self, seconds: float) -> None:
        """End the loop and wait for it, after the screen is gone or before."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            self.loop.kill()  # again, as long as the loop may not have begun yet
            self._thread.join(0.2)
        for event in self._queue.take():
            self.board.apply(event)

    # What is shown.

    def _take_events(self) -> None:
        if not self.is_running:
            return
        taken = self._queue.take()
        for event in taken:
            self.board.apply(event)
        while self._errors:
            self._tell_error(self._errors.pop())
        news = bool(taken or self.board.messages) or self.running is not self._was_running
        for words, severity in self.board.messages:
            self._tell(words, severity)
        self.board.messages.clear()
        if news:
            self._was_running = self.running
            self._refresh_all()

    def _tell(self, words: str, severity: Any = "information") -> None:
        self.notify(words, severity=severity, markup=False, timeout=10)

    def _tell_error(self, error: BaseException) -> None:
        """Show an error as one line; its details go to the loop's log, once."""
        self.error = error
        try:
            log = self.loop.store.log_error("".join(traceback.format_exception(error)))
        except (OSError, StockadeError):
            log = ""
        words = f"{str(error) or type(error).__name__}"
        if isinstance(error, StockadeError) and error.hint:
            words = f"{error}: {error.hint}".split("\n", 1)[0]
        self.board.fail(f"{words} (details: {log})" if log else words)

    def _refresh_all(self) -> None:
        # Screens above may cover the list; the app's own widgets are those of its first screen.
        if not self.screen_stack or not self.screen_stack[0].is_mounted:
            return
        self._refresh_head()
        self._refresh_items()
        self._refresh_attempt()

    def _main(self, selector: str) -> Any:
        return self.screen_stack[0].query_one(selector)

    def _refresh_head(self) -> None:
        board = self.board
        state = board.doing if self.running or board.end or board.doing == "stopped" else "ended"
        record = self.loop.record
        first = f"{state} · {record.id} · {board.agent or 'agent'} · {clean_line(record.project)}"
        names = ", ".join(dict.fromkeys(name for name in board.mechanisms.values() if name))
        walls = f"{board.backend}: {clean_line(names)}" if board.backend else "no walls yet"
        self._main("#head").update(Text(first))
        self._main("#walls").update(Text(walls))

    def _refresh_items(self) -> None:
        table: DataTable[Text] = self._main("#items")
        for item in self.board.items.values():
            cells = _row(item)
            if item.id not in table.rows:
                table.add_row(*cells, key=item.id)
            elif table.get_row(item.id) != cells:
                for name, cell in zip(_COLUMNS, cells, strict=True):
                    table.update_cell(item.id, name, cell)

    def _refresh_attempt(self) -> None:
        item, attempt = self._item(), self._attempt()
        self._main("#attempt").update(_attempt_line(item, attempt))
        now = (item.id if item else "", attempt.number if attempt else 0)
        if now != self._shown:
            self._shown, self._seen = now, {}
        for name, tail_of in _TAILS.items():
            log: RichLog = self._main(f"#{name}-lines")
            if name not in self._seen:
                log.clear()
                self._seen[name] = 0
            if attempt is not None:
                tail = tail_of(attempt)
                for line in tail.since(self._seen[name]):
                    log.write(Text(line, _line_style(name, line)))
                self._seen[name] = tail.total
        self._main("#spending").update(self._spending(item, attempt))

    def _spending(self, item: ItemView | None, attempt: AttemptView | None) -> Text:
        budget = self.loop.record.settings.budget
        shown = Text()
        for name, used, most in (
            ("attempt", attempt.used if attempt else Spending(), budget.attempt),
            ("item", item.used if item else Spending(), budget.item),
            ("loop", self.board.used, budget.loop),
        ):
            shown.append(f"{name:<8}", "bold").append(f"{_budget_line(used, most)}\n")
        shown.append("\nThe supervisor measures the time; the agent says its tokens and cost.\n", "dim")
        for control, mechanism in self.board.mechanisms.items():
            shown.append(f"{clean_line(control):<20} {clean_line(mechanism)}\n", "dim")
        return shown

    # What the user chooses.

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        chosen = event.row_key.value or "" if event.row_key is not None else ""
        if chosen != self._chosen:
            self._chosen, self._number = chosen, 0
            self._refresh_all()

    def _item(self) -> ItemView | None:
        return self.board.items.get(self._chosen)

    def _attempt(self) -> AttemptView | None:
        item = self._item()
        if item is None:
            return None
        return item.attempts.get(self._number) or item.latest()

    def action_attempt(self, direction: int) -> None:
        """Show an earlier or later attempt of the item."""
        item, attempt = self._item(), self._attempt()
        if item is not None and attempt is not None and attempt.number + direction in item.attempts:
            self._number = attempt.number + direction
            self._refresh_all()

    def action_tab(self, name: str) -> None:
        """Show another tab."""
        self.query_one(TabbedContent).active = name

    # What the user does to the loop.

    def _try(self, call: Callable[[], object], done: str) -> None:
        try:
            call()
        except (StockadeError, OSError) as error:
            self._tell(clean_line(str(error)), "error")
        else:
            self._tell(done)

    def action_pause(self) -> None:
        """Finish the attempt, then stop."""
        if self.running:
            self._try(self.loop.pause, "the loop stops when the attempt is over")

    def action_kill(self) -> None:
        """End every process of the loop now."""
        if self.running:
            self._try(self.loop.kill, "ending every process of the loop")

    def action_retry(self) -> None:
        """Give the item its attempts again."""
        if (item := self._item()) is not None:
            self._try(lambda: self.loop.retry(item.id), f"{clean_line(item.id)} gets its attempts again")

    def action_skip(self) -> None:
        """Leave the item out."""
        if (item := self._item()) is not None:
            self._try(lambda: self.loop.skip(item.id), f"{clean_line(item.id)} is left out")

    def action_edit(self) -> None:
        """Edit the item."""
        if (item := self._item()) is None:
            return
        written = self.loop.record.find(item.id).item

        def save(changes: dict[str, Any] | None) -> None:
            if changes:
                self._try(lambda: self.loop.edit(item.id, **changes), f"{clean_line(item.id)} is changed")

        self.push_screen(ItemEditor(written, self.loop.record.settings.verify), save)

    def action_diff(self) -> None:
        """Open the changes of the attempt."""
        item, attempt = self._item(), self._attempt()
        known = self.loop.record.find(item.id).attempts if item else []
        now = [one.workspace for one in known if attempt is not None and one.number == attempt.number]
        self._open_changes(item, now[0] if now else item.workspace if item else "", commit=False)

    def action_commit(self) -> None:
        """Show the files that were held back, and commit them if the user has read them and says so."""
        item = self._item()
        if item is None or item.phase != "held":
            self._tell("nothing of this item was held back", "warning")
            return
        self._open_changes(item, item.workspace, commit=True)

    def _open_changes(self, item: ItemView | None, workspace: str, *, commit: bool) -> None:
        if item is None or not workspace:
            self._tell("there are no changes to show: none yet, or they have landed", "warning")
            return
        self.run_worker(
            lambda: self._read_changes(item, workspace, commit=commit),
            thread=True,
            exclusive=True,
            group="diff",
        )

    def _read_changes(self, item: ItemView, id: str, *, commit: bool) -> None:
        """Read the changes of a workspace, in a thread: a large one takes a while."""
        from stockade.loop.tui.diff_text import render_diff
        from stockade.sandbox.workspace import Workspace

        try:
            diff = Workspace.open(id).diff()
            text, whole = render_diff(diff, id)
        except (StockadeError, OSError) as error:
            self._later(self._tell, clean_line(str(error)), "warning")
            return
        title = f"{clean_line(item.id)}: {len(diff)} changed, +{diff.added} -{diff.removed}"
        if commit and (not whole or not diff.digest):
            self._later(
                self._tell, f"too much to read here: stockade diff {id}, then stockade commit {id}", "warning"
            )
            return
        question = "c: commit these files, which a tool of yours will run or obey" if commit else ""
        paths = [one.path for one in diff.files]
        self._later(self._show_changes, item, id, Reader(title, text, question), paths, diff.digest)

    def _show_changes(self, item: ItemView, id: str, reader: Reader, paths: list[str], digest: str) -> None:
        if isinstance(self.screen, ModalScreen):
            return

        def answered(commit: bool | None) -> None:
            if commit:
                self.run_worker(
                    lambda: self._commit_files(item, id, paths, digest), thread=True, group="commit"
                )

        self.push_screen(reader, answered)

    def _commit_files(self, item: ItemView, id: str, paths: list[str], digest: str) -> None:
        """Commit what was shown, and nothing that has changed since."""
        from stockade.sandbox.workspace import Workspace

        try:
            done = Workspace.open(id).commit(paths, allow_exec_config=True, protect=(), expect=digest)
            self.loop.release(item.id)
        except (StockadeError, OSError) as error:
            self._later(self._tell, clean_line(str(error)), "error")
            return
        if done.held:
            left = ", ".join(clean_line(one.path) for one in done.held[:3])
            self._later(self._tell, f"still held back: {left}: stockade commit {id}", "warning")
            return
        more = "" if self.running else "; g goes on"
        self._later(self._tell, f"{clean_line(item.id)}: committed {len(done.changes)}{more}")

    def _later(self, call: Callable[..., object], *args: Any) -> None:
        """Call something in the screen's own thread, if there still is a screen."""
        if self.is_running:
            self.call_later(call, *args)

    # Leaving.

    async def action_quit(self) -> None:
        self.action_leave()

    def action_leave(self) -> None:
        """Leave; while the loop runs or is paused, ask first, and only once."""
        if isinstance(self.screen, ModalScreen):
            return
        paused = self.board.end is not None and self.board.end.outcome == "paused"
        if not self.running and not paused:
            self.exit()
            return
        words = "The loop is paused." if paused else "The loop is running. Attempts under way are ended."
        question = f"{words} `stockade loop resume` continues it.\n\nLeave?"

        def answered(leave: bool | None) -> None:
            if leave:
                self.exit()

        self.push_screen(Question(question), answered)


def _title_width(columns: int) -> int:
    return max(10, columns - sum(_WIDTHS.values()) - 2 * len(_COLUMNS))


def _row(item: ItemView) -> list[Text]:
    mark, style = _MARKS[item.phase]
    return [
        Text(f"{mark} {item.phase}", style),
        Text(clean_line(item.id), no_wrap=True, overflow="ellipsis"),
        Text(clean_line(item.title)[:500], no_wrap=True, overflow="ellipsis"),
        Text(str(item.count)),
        Text(f"{item.used.seconds:.0f}s"),
        Text(f"${item.used.cost_usd:.2f}"),
    ]


def _attempt_line(item: ItemView | None, attempt: AttemptView | None) -> Text:
    line = Text()
    if item is None:
        return line
    if attempt is None:
        return line.append(f"{clean_line(item.id)}: {item.reason or 'no attempt yet'}")
    of = f" of {attempt.of}" if attempt.of else ""
    line.append(f"attempt {attempt.number}{of}", "bold")
    line.append(f"  {attempt.outcome or item.phase}  +{attempt.diff.added} -{attempt.diff.removed}")
    return line.append(f"  {attempt.reason or item.reason}", "dim")


def _line_style(tab: str, line: str) -> str:
    if tab == "network":
        return "red" if not line.startswith("allowed") else "green"
    if tab == "judge" and line.startswith(("passed:", "rejected:")):
        return "bold green" if line.startswith("passed") else "bold red"
    return ""


def _budget_line(used: Spending, most: Budget) -> str:
    def of(value: float | None, unit: str) -> str:
        return f" of {value:g}{unit}" if value is not None else ""

    return (
        f"{used.seconds:.0f}{of(most.time, '')} seconds, {used.tokens}{of(most.tokens, '')} tokens, "
        f"${used.cost_usd:.2f}{of(most.cost, '')}"
    )
