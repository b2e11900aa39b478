"""What was opened and nobody has closed: at its end the interpreter closes it while it still can.

An object that is deleted only when modules are taken apart finds nothing
left to close itself with.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from _weakrefset import WeakSet
from collections.abc import Callable
from typing import Any

_opened: WeakSet[Any] = WeakSet()


def opened(thing: Any) -> None:
    """From now on it is closed at the end, by its `__del__`, unless it was closed before."""
    _opened.add(thing)


def first(close: Callable[[], None]) -> None:
    """Call that at the end, before what is left is closed: it closes what it has opened itself."""
    atexit.register(close)  # the last one that is registered is the first one that is called


def tell(words: str, owner: int) -> None:
    """Warn whoever has not closed it; a forked child need not."""
    if owner == os.getpid():
        warnings.warn(words, ResourceWarning, stacklevel=3)


def _close() -> None:
    for thing in list(_opened):
        try:
            thing.__del__()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


atexit.register(_close)
