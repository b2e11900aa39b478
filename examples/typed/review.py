"""Let a command change a directory, look at what it changed, and take over a part of it.

python review.py DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from stockade import Change, Policy, Result, Sandbox, Workspace


def edit(directory: str) -> tuple[Result, Workspace]:
    """Run an edit in a sandbox that keeps its changes, and return its result and the workspace."""
    with Sandbox(Policy(workspace=directory), name="edit") as box:
        box.files.write("notes/todo.txt", "write tests\n", parents=True)
        result = box.run(["sh", "-c", "echo built > artifact; cat notes/todo.txt"], timeout="30s").check()
        with box.shell() as shell:
            shell.run("cd notes && echo more >> todo.txt", env={"CI": 1}).check()
        workspace = box.workspace
        workspace.snapshot("edited")
    return result, Workspace.open(workspace.id)


def describe(changes: Iterator[Change]) -> Iterator[str]:
    """Return one line for each change."""
    for change in changes:
        yield f"{change.kind} {change.path}"


def main(directory: str) -> None:
    """Edit, show, and commit the notes but not the artifact."""
    result, workspace = edit(directory)
    print(result.text, end="")
    print("\n".join(describe(iter(workspace.changes()))))
    for file in workspace.diff():
        print(file.path)
    done = workspace.commit(["notes"])
    print("committed:", *(change.path for change in done))
    try:
        with workspace.files as files:
            files.read("missing")
    except FileNotFoundError as error:
        print("missing:", error.filename == f"{workspace.path}/missing")
    workspace.discard()


if __name__ == "__main__":
    main(sys.argv[1])
