"""`python -m stockade` is the `stockade` command."""

from __future__ import annotations

from stockade.cli import command

if __name__ == "__main__":
    command()
