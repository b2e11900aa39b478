"""Find what a draft needs on systems other than Linux.

These probes only look whether something exists and do not try it, because drafts start nothing. Each answer
says what is missing.
"""

from __future__ import annotations

import os

from stockade.host.capabilities import ELSEWHERE, Probe, called

SANDBOX_EXEC = "/usr/bin/sandbox-exec"
CONTAINER = ("/usr/local/bin/container", "/opt/homebrew/bin/container")


def probe(system: str) -> dict[str, Probe]:
    """Run the probes of that system."""
    return {name: _found(name, called(system)) for name in ELSEWHERE[system]}


def _found(name: str, system: str) -> Probe:
    if name == "sandbox-exec":
        return _program(name, (SANDBOX_EXEC,), "it is part of macOS; this one does not have it any more")
    if name == "apple-container":
        return _program("container", CONTAINER, "install Apple's `container`, for macOS 26 on Apple silicon")
    missing = _symbols({"jobobject": ("CreateJobObjectW", "SetInformationJobObject")}.get(name, (name,)))
    if not missing:
        return Probe(ok=True)
    return Probe(ok=False, reason=f"this {system} has no {', '.join(missing)}", fix=f"use a current {system}")


def _program(name: str, places: tuple[str, ...], fix: str) -> Probe:
    for place in places:
        if os.access(place, os.X_OK):
            return Probe(ok=True, detail=place)
    return Probe(ok=False, reason=f"{name} was not found: {', '.join(places)}", fix=fix)


def _symbols(names: tuple[str, ...]) -> list[str]:
    """Return the names that the system's own library does not have."""
    import ctypes

    try:
        library = ctypes.CDLL("kernel32" if os.name == "nt" else None)
    except OSError:
        return list(names)
    return [name for name in names if not hasattr(library, name)]
