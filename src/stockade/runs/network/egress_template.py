"""The template of this supervisor's egress processes: started on first need, and again when it is stale."""

from __future__ import annotations

import os
import sys
import threading

from stockade import gate
from stockade.gate import client
from stockade.gate.template import ENVIRON, WORDS, Template, template_text
from stockade.gate.wire import KIND_HOST_NETWORK

#: How long the modules may take to load.
SECONDS = 30.0
#: What copies have loaded.
PRELOAD = ("stockade.egress.confined", "stockade.egress.process")
#: asyncio does without it, and a tenth of the time to start is saved.
ABSENT = ("ssl",)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(gate.__file__)))
#: What a template loads of the package: these directories, and these files.
_ROOMS = ("egress", "egress/decoders")
_FILES = (
    "__init__.py",
    "_version.py",
    "errors.py",
    "inside/template_interpreter.py",
    "lazy.py",
    "linux/__init__.py",
    "linux/secure_buffer.py",
    "linux/sha256.py",
    "policy/__init__.py",
    "policy/net_rules.py",
)

#: The device, inode, size and time of change of a file that the template has loaded.
Stamp = tuple[int, int, int, int] | None


class _EgressTemplate:
    """The one that new egress processes are copied from, and the files as they were when it was started."""

    lock = threading.Lock()
    current: Template | None = None
    stamps: tuple[Stamp, ...] = ()


def _stamp(path: str) -> Stamp:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def loaded_files() -> list[str]:
    """Return the files that a template is made of: the interpreter, the gate, and our own modules."""
    files = [sys.executable, gate.executable(), gate.library()]
    files += [os.path.join(_PACKAGE, name) for name in _FILES]
    for room in (os.path.join(_PACKAGE, name) for name in _ROOMS):
        files += [os.path.join(room, name) for name in sorted(os.listdir(room)) if name.endswith(".py")]
    return files


def _stamps() -> tuple[Stamp, ...]:
    return tuple(map(_stamp, loaded_files()))


def egress_template() -> Template:
    """Return the template, a new one if the files of the last one have changed. Nothing is started yet."""
    stamps = _stamps()
    with _EgressTemplate.lock:
        old = _EgressTemplate.current
        if old is not None and _EgressTemplate.stamps == stamps:
            return old
        _EgressTemplate.current, _EgressTemplate.stamps = _new_template(), stamps
        current = _EgressTemplate.current
    if old is not None:
        client.retire(old)
    return current


def _new_template() -> Template:
    place = os.path.dirname(_PACKAGE)

    def text(kind: str, order: str) -> bytes:
        return template_text(kind, order, PRELOAD, set(), (place,), ABSENT)

    return Template(argv=(sys.executable, *WORDS), environ=ENVIRON, text=text, seconds=SECONDS)


def warm_up() -> None:
    """Start the template, if there is none yet, and do not wait until it is ready.

    Whether it is stale, the launch finds out.
    """
    if _EgressTemplate.current is not None:
        return
    client.resident(KIND_HOST_NETWORK, scoped=False, template=egress_template(), wait=False)


def _after_fork() -> None:
    """Let a forked child have a template of its own."""
    _EgressTemplate.lock = threading.Lock()
    _EgressTemplate.current = None


os.register_at_fork(after_in_child=_after_fork)
