"""The programs in `examples/integrations` do what they say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.means import need
from support.paths import ROOT

EXAMPLES = ROOT / "examples" / "integrations"
SAYS = {
    "notebook.py": [
        "[{'text/plain': '17'}]",
        "[{'text/plain': '<IPython.core.display.HTML object>'}]",
        "sum.txt",
    ],
    "openai_agents.py": ["repaired", "changed: sum.py"],
    "mini_swe_agent.py": ["{'exit_status': 'Submitted', 'submission': '2\\n'}", "changed: sum.py"],
    "test_project.py": ["2 passed"],
}
NEEDS = {"notebook.py": "nbclient", "openai_agents.py": "agents", "mini_swe_agent.py": "minisweagent"}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name: str, workspace: Path, tmp_path: Path) -> None:
    module = NEEDS.get(name, "pytest")
    need(importlib.util.find_spec(module) is not None, f"{module} is not installed")
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "MSWEA_SILENT_STARTUP": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [str(EXAMPLES / name), str(workspace)]
    if name.startswith("test_"):
        own = [
            "-p",
            "stockade.integrations.pytest_plugin",
            f"--rootdir={workspace}",
            f"--basetemp={tmp_path}/t",
        ]
        command = ["-m", "pytest", *own, command[0]]
    done = subprocess.run(
        [sys.executable, "-P", *command],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
    assert not (workspace / "sum.txt").exists()
