"""The templates of this supervisor's egress processes: started on first need, and again when they are stale.

There are two, because TLS and HTTP/2 take memory and time that sandboxes without rules for requests do not
need.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import ClassVar

from stockade import gate
from stockade.gate import client
from stockade.gate.template import ENVIRON, WORDS, Template, template_text
from stockade.gate.wire import KIND_HOST_NETWORK
from stockade.linux.root_certificates import system_bundle

#: How long the modules may take to load.
SECONDS = 30.0
#: What copies have loaded.
PRELOAD = ("stockade.egress.confined", "stockade.egress.process")
#: What copies have loaded besides that judge requests.
PRELOAD_JUDGES = (
    "stockade.egress.termination.http_termination",
    "stockade.egress.termination.secret_exchange",
)
#: asyncio does without it, and a tenth of the time to start is saved.
ABSENT = ("ssl",)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(gate.__file__)))
#: What a template loads of the package: these directories, and these files.
_ROOMS = ("egress", "egress/decoders", "egress/termination")
_FILES = (
    "__init__.py",
    "_version.py",
    "errors.py",
    "inside/template_interpreter.py",
    "lazy.py",
    "linux/__init__.py",
    "linux/root_certificates.py",
    "linux/secure_buffer.py",
    "linux/sha256.py",
    "policy/__init__.py",
    "policy/http_rules.py",
    "policy/http_targets.py",
    "policy/net_addresses.py",
    "policy/net_errors.py",
    "policy/net_names.py",
    "policy/net_ports.py",
    "policy/net_rule_set.py",
    "policy/net_rules.py",
)

#: The device, inode, size and time of change of a file that the template has loaded.
Stamp = tuple[int, int, int, int] | None


class _Templates:
    """Those that new egress processes are copied from, by whether they judge requests.

    Each with the files as they were when it was started.
    """

    lock = threading.Lock()
    current: ClassVar[dict[bool, tuple[Template, tuple[Stamp, ...]]]] = {}


def _stamp(path: str) -> Stamp:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def loaded_files(*, judges: bool = False) -> list[str]:
    """Return the files that a template is made of: the interpreter, the gate, and our own modules."""
    files = [sys.executable, gate.executable(), gate.library()]
    files += [os.path.join(_PACKAGE, name) for name in _FILES]
    for room in (os.path.join(_PACKAGE, name) for name in _ROOMS):
        files += [os.path.join(room, name) for name in sorted(os.listdir(room)) if name.endswith(".py")]
    return [*files, system_bundle()] if judges else files


def _stamps(judges: bool = False) -> tuple[Stamp, ...]:
    return tuple(map(_stamp, loaded_files(judges=judges)))


def egress_template(*, judges: bool = False) -> Template:
    """Return the template, a new one if the files of the last one have changed. Nothing is started yet."""
    stamps = _stamps(judges)
    with _Templates.lock:
        old = _Templates.current.get(judges)
        if old is not None and old[1] == stamps:
            return old[0]
        new = _new_template(judges)
        _Templates.current[judges] = new, stamps
    if old is not None:
        client.retire(old[0])
    return new


def _new_template(judges: bool) -> Template:
    place = os.path.dirname(_PACKAGE)
    modules = (*PRELOAD, *PRELOAD_JUDGES) if judges else PRELOAD

    def text(kind: str, order: str) -> bytes:
        return template_text(kind, order, modules, set(), (place,), ABSENT)

    return Template(argv=(sys.executable, *WORDS), environ=ENVIRON, text=text, seconds=SECONDS)


def warm_up(*, judges: bool = False) -> None:
    """Start the template, if there is none yet, and do not wait until it is ready.

    Whether it is stale, the launch finds out.
    """
    if judges not in _Templates.current:
        template = egress_template(judges=judges)
        client.resident(KIND_HOST_NETWORK, scoped=False, template=template, wait=False)


def _after_fork() -> None:
    """Let a forked child have templates of its own."""
    _Templates.lock = threading.Lock()
    _Templates.current = {}


os.register_at_fork(after_in_child=_after_fork)
