"""A policy is a checked, frozen value: what it takes, what it refuses, and in which words."""

from __future__ import annotations

import subprocess
import sys


def test_importing_policies_stays_cheap() -> None:
    code = "import sys, stockade.policy; stockade.policy.Policy(workspace='.'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"json", "tomllib", "asyncio", "dataclasses", "pathlib", "difflib", "hashlib", "pwd", "argparse"}
    assert heavy.isdisjoint(done.stdout.split())
