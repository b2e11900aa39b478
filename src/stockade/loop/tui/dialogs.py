"""The screens above the list: a question, a text to read, an item to edit."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Label, Static, TextArea

from stockade.loop.items.item import WorkItem


class Question(ModalScreen[bool]):
    """Asks one thing; y is yes, everything else that closes it is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    CSS = """
    Question { align: center middle; }
    Question Vertical { width: 64; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    """

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._words))
            yield Static(Text("\ny: yes     n: no"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Reader(ModalScreen[bool]):
    """Shows a text. With `question`, c answers it with yes, but only once the end has been on the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", "Back"),
        Binding("c", "commit", "Commit"),
        Binding("end,G", "bottom", "End", show=False),
        Binding("home,g", "top", "Begin", show=False),
        Binding("space,pagedown", "page(1)", "Page"),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("down,j", "line(1)", "Down", show=False),
        Binding("up,k", "line(-1)", "Up", show=False),
    ]
    CSS = """
    Reader { background: $background; }
    Reader #title { height: auto; max-height: 3; background: $primary-darken-2; padding: 0 1; }
    Reader VerticalScroll { height: 1fr; }
    """

    def __init__(self, title: str, text: Text, question: str = "") -> None:
        super().__init__()
        self._title, self._text, self._question = title, text, question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._title}\n{self._question}".rstrip()), id="title")
        with VerticalScroll(id="page"):
            yield Static(self._text, id="text")
        yield Footer()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self._question) if action == "commit" else True

    @property
    def page(self) -> VerticalScroll:
        return self.query_one("#page", VerticalScroll)

    def action_commit(self) -> None:
        if self.page.scroll_offset.y < self.page.max_scroll_y:
            self.notify("read to the end first", severity="warning", markup=False)
        else:
            self.dismiss(True)

    def action_close(self) -> None:
        self.dismiss(False)

    def action_bottom(self) -> None:
        self.page.scroll_end(animate=False)

    def action_top(self) -> None:
        self.page.scroll_home(animate=False)

    def action_page(self, direction: int) -> None:
        self.action_line(direction * max(1, self.page.size.height - 1))

    def action_line(self, lines: int) -> None:
        self.page.scroll_relative(y=lines, animate=False)


class ItemEditor(ModalScreen[dict[str, Any] | None]):
    """Edits the title, the body and the verify command of an item; returns what was changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("escape", "cancel", "Cancel", priority=True),
    ]
    CSS = """
    ItemEditor { background: $background; }
    ItemEditor Input { border: none; height: 1; background: $surface; }
    ItemEditor TextArea { height: 1fr; border: none; }
    """

    def __init__(self, item: WorkItem, verify: str) -> None:
        super().__init__()
        self._item, self._verify = item, verify

    def compose(self) -> ComposeResult:
        yield Label(Text(f"title of {self._item.id}"))
        yield Input(self._item.title, id="title", select_on_focus=False)
        yield Label(Text("verify command of this item alone"))
        yield Input(self._item.verify, placeholder=self._verify, id="verify", select_on_focus=False)
        yield Label(Text("what the agent gets to read"))
        yield TextArea(self._item.body, id="body")
        yield Footer()

    def action_save(self) -> None:
        new = {
            "title": self.query_one("#title", Input).value.strip(),
            "verify": self.query_one("#verify", Input).value.strip(),
            "body": self.query_one("#body", TextArea).text,
        }
        if not new["title"]:
            self.notify("an item needs a title", severity="warning", markup=False)
            return
        self.dismiss({name: value for name, value in new.items() if value != getattr(self._item, name)})

    def action_cancel(self) -> None:
        self.dismiss(None)
