"""The hold-back table: which files programs of the host run or obey, entry by entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_run_that_commits_nothing_does_not_load_the_table(workspace: Path) -> None:
    code = (
        "import sys, stockade; stockade.run(['touch', 'x'], stockade.Policy(workspace=sys.argv[1])).check();"
        "print([name for name in sys.modules if 'holdback' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(workspace)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
