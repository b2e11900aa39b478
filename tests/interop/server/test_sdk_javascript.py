"""The published JavaScript SDK, unmodified: `sdk.mjs` has the tests, one function each."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from support.javascript import javascript_sdk

SCRIPT = Path(__file__).with_name("sdk.mjs")
TESTS = re.findall(r"^test\(\"(.*)\",", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def faults(address: tuple[str, str]) -> dict[str, str | None]:
    """What each test of the script says: None, or why it failed. One node runs them all."""
    domain, key = address
    environment = {**os.environ, "OPEN_SANDBOX_DOMAIN": domain, "OPEN_SANDBOX_API_KEY": key}
    environment |= {"NODE_SDK": javascript_sdk()}
    done = subprocess.run(
        ["node", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: fault for line in done.stdout.splitlines() for name, fault in json.loads(line).items()}


@pytest.mark.parametrize("name", TESTS)
def test_javascript(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None


def test_the_script_has_no_test_beside_these(faults: dict[str, str | None]) -> None:
    assert list(faults) == TESTS
