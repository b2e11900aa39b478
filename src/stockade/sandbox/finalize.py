"""Close what is still open when the interpreter exits, while it still can.

An object that is deleted during the teardown of modules has nothing left to
close itself with.
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


def close_at_exit(thing: Any) -> None:
    """Register an object: at exit its `__del__` closes it, unless it was closed before."""
    _opened.add(thing)


def call_before_closing(close: Callable[[], None]) -> None:
    """Register a call for the exit, before registered objects are closed: it closes its own objects."""
    atexit.register(close)  # atexit calls the last registered function first


def warn_unclosed(words: str, owner: int) -> None:
    """Warn the user about an object that was not closed; not in a forked child, which does not own it."""
    if owner == os.getpid():
        warnings.warn(words, ResourceWarning, stacklevel=3)


def _close() -> None:
    for thing in list(_opened):
        try:
            thing.__del__()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


atexit.register(_close)
