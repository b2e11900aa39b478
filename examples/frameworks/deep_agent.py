"""A deep agent that works on a copy of this directory: what it changes waits for your review."""

import sys

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel

import stockade
from stockade.integrations.deepagents import StockadeBackend


def work(model: str | BaseChatModel, task: str, directory: str = ".") -> str:
    """Let an agent do the task; return the id of the workspace that has its changes."""
    with stockade.Sandbox(stockade.Policy(workspace=directory)) as box:
        agent = create_deep_agent(model=model, backend=StockadeBackend(box))
        agent.invoke({"messages": [{"role": "user", "content": task}]})
        return box.workspace.id


if __name__ == "__main__":
    print(f"stockade diff {work(*sys.argv[1:3])}")
