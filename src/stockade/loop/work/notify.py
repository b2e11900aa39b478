"""Tell a person: run the notify command, which the user or a trusted file named."""

from __future__ import annotations

import os
import subprocess

from stockade.linux.plain_text import clean_line
from stockade.loop.events import LoopEvent
from stockade.loop.record import encode

#: How long a notify command may take.
PATIENCE = 30.0


def notify(command: str, event: LoopEvent, message: str, project: str) -> str:
    """Run the command outside of every sandbox; return why it failed, or "".

    It gets the event as JSON on stdin, and one plain line in STOCKADE_LOOP_MESSAGE. Nothing that an agent
    wrote becomes a part of the command.
    """
    environ = {**os.environ, "STOCKADE_LOOP_MESSAGE": clean_line(message)[:1000]}
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            input=encode(event),
            env=environ,
            cwd=project,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the notify command did not end within {PATIENCE:g} seconds"
    except OSError as error:
        return f"the notify command cannot be started: {error.strerror}"
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
        return f"the notify command exited with {done.returncode}: {clean_line(last[0][:200])}"
    return ""
