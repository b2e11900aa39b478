"""A program that leaves its sandbox to the next one: run it again with the id that it prints."""

import asyncio
import sys

from pydantic_ai.workspaces import Workspace, WorkspaceRef, WorkspaceUnavailableError

from stockade.integrations.pydantic_ai import StockadeWorkspace


async def count(id: str | None = None) -> tuple[str, str]:
    """Count the calls in a file of the sandbox; return the sandbox's id and the number."""
    ref = None if id is None else WorkspaceRef(provider="stockade", id=id)
    backend = StockadeWorkspace(ref=ref, idle_timeout="10m")
    done = await Workspace(backend).run("echo >> calls; wc -l < calls", shell=True)
    assert backend.ref is not None
    return backend.ref.id, done.stdout.strip()


if __name__ == "__main__":
    try:
        print(*asyncio.run(count(*sys.argv[1:2])))
    except WorkspaceUnavailableError as error:
        sys.exit(str(error))
