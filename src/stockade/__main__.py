"""`python -m stockade` is the `stockade` command."""

from __future__ import annotations

import sys

from stockade.cli import main

if __name__ == "__main__":
    sys.exit(main())
