"""Interpreters for templates, with modules of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stockade.functions.warm_python import WarmPython
from stockade.gate import client


def environment(prefix: Path, **modules: str) -> Path:
    """A virtual environment of the system's Python with these modules installed; its interpreter."""
    base = Path(os.path.realpath("/usr/bin/python3"))
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python3").symlink_to(base)
    (prefix / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    version = base.name if base.name != "python3" else f"python3.{sys.version_info.minor}"
    installed = prefix / "lib" / version / "site-packages"
    installed.mkdir(parents=True)
    for name, text in modules.items():
        (installed / f"{name}.py").write_text(text)
    return prefix / "bin/python3"


def template_pid(python: WarmPython) -> int:
    """The process of its template."""
    return next(known.pid for key, known in client._residents.items() if python._template in key)
