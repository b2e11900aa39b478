"""An evaluation of Inspect whose samples run in sandboxes: run it with `inspect eval`."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from stockade.integrations.inspect_ai import StockadeConfig


@scorer(metrics=[accuracy()])
def sorted_file() -> Scorer:
    """Look into the sandbox for what the model has made."""

    async def score(state: TaskState, target: Target) -> Score:
        done = await sandbox().exec(["cat", "sorted.txt"], timeout=10)
        return Score(value=CORRECT if done.stdout.split() == target.text.split() else INCORRECT)

    return score


@task
def sort_a_file() -> Task:
    """Let a model sort the lines of a file with its bash tool."""
    return Task(
        dataset=[
            Sample(
                input="Sort the lines of words.txt into sorted.txt.",
                files={"words.txt": "pear\napple\nfig\n"},
                target="apple fig pear",
            )
        ],
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=sorted_file(),
        sandbox=SandboxEnvironmentSpec("stockade", StockadeConfig(policy={"limits": {"wall": "5m"}})),
    )
