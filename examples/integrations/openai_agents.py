"""An agent of the OpenAI Agents SDK repairs a file in a copy of a directory."""

import asyncio
import sys
from pathlib import Path

from agents import RunConfig, Runner, set_tracing_disabled
from agents.run_config import SandboxRunConfig
from agents.sandbox import SandboxAgent
from agents.testing import ScriptedModel, assistant_message, function_call

from stockade import Policy, Workspace
from stockade.integrations.openai_agents import StockadeSandboxClient

directory = Path(sys.argv[1]).resolve()
(directory / "sum.py").write_text("print(1 - 1)\n")

# A model that answers from a script; with a key of yours, leave `model` out or name one.
repair = "sed -i 's/-/+/' sum.py && python3 sum.py"
model = ScriptedModel(
    [[function_call("exec_command", {"cmd": repair}, call_id="1")], [assistant_message("repaired")]]
)


async def main() -> None:
    """Let the agent work, then show what it changed."""
    client = StockadeSandboxClient(Policy(workspace=str(directory)))
    agent = SandboxAgent(name="fixer", model=model, instructions="Repair the project.")
    config = RunConfig(sandbox=SandboxRunConfig(client=client))
    result = await Runner.run(agent, "sum.py prints 0 instead of 2", run_config=config)
    print(result.final_output)
    (workspace,) = Workspace.list()
    print("changed:", *(change.path for change in workspace.diff()))
    workspace.discard()


set_tracing_disabled(True)
asyncio.run(main())
