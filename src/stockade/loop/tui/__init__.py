"""The loop on a terminal: what `stockade loop --tui` shows.

    board ◄─ event_queue ◄─ the loop's threads
      │
      ▼
    app ─► dialogs, diff_text

The loop runs in a thread of its own and knows nothing of the screen: it puts events into a queue, and the
screen takes them out when it has time. So a loop can go on after the screen is gone, and the other way
round. `board` folds the events into what is shown; it needs no terminal. Everything shown was chosen by an
agent or by what it ran: text is cleaned, and none of it is markup.
"""

from __future__ import annotations

from stockade.errors import StockadeError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.loop.events import LoopEnd
    from stockade.loop.tui.app import LoopApp
    from stockade.loop.tui.control import LoopControl

#: How long to wait for the loop's threads after the screen is gone, in seconds.
LAST_WAIT = 15.0


def import_app() -> type[LoopApp]:
    """Return the screen's class, or refuse if the extra `loop` is not installed."""
    try:
        from stockade.loop.tui.app import LoopApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("textual", "rich"):
            raise
        raise UnsupportedError(
            "the screen of a loop needs textual, which is not installed",
            hint="install it: pip install 'stockade[loop]'; or leave --tui out",
        ) from None
    return LoopApp


def run_tui(loop: LoopControl) -> LoopEnd | None:
    """Run a loop and show it until the user leaves; return how it ended, None if it was left before.

    Raises what the loop refused to start for, once the screen is gone.
    """
    app = import_app()(loop)
    app.run()
    app.end_loop(LAST_WAIT)
    if isinstance(app.error, StockadeError):
        raise app.error
    return app.board.end
