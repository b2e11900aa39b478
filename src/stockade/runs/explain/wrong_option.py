"""Explain an option that a call does not have: what the caller meant, and what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from stockade.policy import Policy

#: Options of `subprocess.run`, and what takes their place.
INSTEAD = {
    "capture_output": "leave it out: the result has stdout and stderr",
    "check": "leave it out, and call check() on the result",
    "encoding": "leave it out: the result's text and stderr_text are decoded",
    "shell": 'leave it out, and run a shell: ["sh", "-c", "..."]',
    "stderr": "leave it out: the result has stderr; on_stderr=... gets it as it comes",
    "stdin": "write input=..., which is bytes or text",
    "stdout": "leave it out: the result has stdout; on_stdout=... gets it as it comes",
    "text": "leave it out: the result's text and stderr_text are decoded",
    "universal_newlines": "leave it out: the result's text and stderr_text are decoded",
}


def explain(call: str, name: str, value: object, known: Iterable[str]) -> str:
    """Return the message of the TypeError for an unknown option."""
    return f"{call}() has no option {name!r}: {_meant(name, value, known)}"


def _meant(name: str, value: object, known: Iterable[str]) -> str:
    names = sorted(known)
    if name == "workspace" and "resume" in names and hasattr(value, "layer"):
        return "to go on in a workspace, write resume=..."
    if name in Policy.__struct_fields__:
        return f"it is a clause of the policy: write Policy({name}={value!r:.200})"
    if name in INSTEAD:
        return INSTEAD[name]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
