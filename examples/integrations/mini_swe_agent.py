"""mini-swe-agent repairs a file in a copy of a directory."""

import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

from stockade import Workspace

directory = Path(sys.argv[1]).resolve()
(directory / "sum.py").write_text("print(1 - 1)\n")
environment = get_environment(
    {
        "environment_class": "stockade.integrations.mini_swe_agent.StockadeEnvironment",
        "policy": {"workspace": str(directory), "limits": {"wall": "10m"}},
    }
)
# A model that answers from a script, instead of one that costs money.
commands = ["sed -i 's/-/+/' sum.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; python3 sum.py"]
model = DeterministicModel(outputs=[make_output("", [{"command": command}]) for command in commands])
agent = DefaultAgent(model, environment, system_template="Repair it.", instance_template="{{task}}")
print(agent.run("sum.py prints 0 instead of 2"))
environment.cleanup()
(workspace,) = Workspace.list()
print("changed:", *(change.path for change in workspace.diff()))
workspace.discard()
