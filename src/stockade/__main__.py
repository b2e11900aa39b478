"""`python -m stockade` is the command."""

from __future__ import annotations

from stockade.cli import command

command()
