"""Run two evaluations with scripted models, the example and one with Inspect's own tools; print the results.

inspect_evaluations.py EXAMPLE LOG-DIRECTORY
"""

import importlib.util
import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox


def scripted(*outputs: ModelOutput):
    """Return a model that says this, and counts no tokens, which it would need the network for."""
    said = [output.model_copy(update={"usage": ModelUsage()}) for output in outputs]
    return get_model("mockllm/model", custom_outputs=said)


def evaluate(task: Task, *outputs: ModelOutput):
    return eval(task, model=scripted(*outputs), display="none", log_dir=sys.argv[2])[0]


def example():
    spec = importlib.util.spec_from_file_location("example", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sort = ModelOutput.for_tool_call("mockllm", "bash", {"command": "sort words.txt > sorted.txt"})
    log = evaluate(module.sort_a_file(), sort, ModelOutput.from_content("mockllm", "done"))
    return str(log.error) if log.error else log.results.scores[0].metrics["accuracy"].value


@solver
def with_tools() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        first = await sandbox().exec_remote(["sh", "-c", "echo out; echo err >&2; exit 3"], stream=False)
        second = await sandbox().exec_remote(["cat", "given.txt"], stream=False)
        state.metadata["answers"] = [first.returncode, first.stdout, first.stderr, second.stdout]
        return state

    return solve


def own_tools():
    task = Task([Sample("x", files={"given.txt": "given"})], solver=with_tools(), sandbox="stockade")
    log = evaluate(task)
    return str(log.error) if log.error else log.samples[0].metadata["answers"]


print(json.dumps({"example": example(), "tools": own_tools()}))
