"""The tools of the server. Their docstrings are what a model reads about them.

Every argument comes from a model: each tool validates by the library's own calls, which take nothing that
could change the policy. `commit` exists only if the user started the server with --allow-commit, and it asks
the user each time, through the client.
"""

import asyncio
import base64
import binascii
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec

from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import CallToolResult, ToolAnnotations
from pydantic import BaseModel, Field

from stockade._version import __version__
from stockade.errors import NotFoundError, PolicyError, StockadeError
from stockade.integrations.mcp import answers
from stockade.integrations.mcp.workbench import Workbench
from stockade.linux.plain_text import clean_line
from stockade.workspace.diff.diff import Diff

P = ParamSpec("P")
Tool = Callable[P, Awaitable[CallToolResult]]

INSTRUCTIONS = (
    "Tools that run commands and code in a sandbox. The user's policy decides what they can see, change and "
    "reach; no tool can change it, and `policy` shows it. Changes are kept aside from the user's files: "
    "`diff` shows them, and the user decides about them. If something is refused, `explain` says by which "
    "clause."
)
#: Seconds that a call may take unless it says otherwise; the policy's `limits.wall` ends it earlier.
TIMEOUT = 120.0
#: The longest number of a run; Python reads no number of more than 4,300 digits.
MOST_DIGITS = 18
#: How many paths a question to the user lists: a person reads them.
MOST_ASKED = 200

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

Timeout = Annotated[float, Field(gt=0, le=86400, description="seconds; the policy's own limit counts too")]
Path = Annotated[str, Field(description="relative to the workspace, or absolute")]


def make_server(bench: Workbench, *, allow_commit: bool = False, lifespan: Any = None) -> MCPServer[Any]:
    """Return the server with its tools. Nothing is opened before a tool needs the sandbox."""
    server: MCPServer[Any] = MCPServer(
        "stockade", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING", lifespan=lifespan
    )
    for kind, tools in (
        (RUNS, _running_tools(bench)),
        (READS, _reading_tools(bench)),
        (CHANGES, [*_changing_tools(bench), *([_commit_tool(bench)] if allow_commit else [])]),
    ):
        for tool in tools:
            server.add_tool(
                _answering(bench, tool),
                description=inspect.getdoc(tool),
                annotations=kind,
                structured_output=False,
            )
    return server


def _answering(bench: Workbench, tool: Tool[P]) -> Tool[P]:
    """Return the tool with Stockade's errors as answers that say what to do."""

    @functools.wraps(tool)
    async def call(*args: P.args, **options: P.kwargs) -> CallToolResult:
        with bench.call():
            try:
                return await tool(*args, **options)
            except StockadeError as error:
                raise _tool_error(error) from error
            except OSError as error:
                raise ToolError(clean_line(str(error))) from error

    return call


def _tool_error(error: StockadeError) -> ToolError:
    return ToolError(clean_line(error.message) + (f"\nhint: {clean_line(error.hint)}" if error.hint else ""))


def _running_tools(bench: Workbench) -> list[Tool[...]]:
    async def run(
        argv: Annotated[list[str], Field(min_length=1, description="the program and its arguments")],
        stdin: str = "",
        cwd: Annotated[str, Field(description="where it starts; default: where the server was started")] = "",
        timeout: Timeout = TIMEOUT,
    ) -> CallToolResult:
        """Run one program in the sandbox, without a shell, and return how it ended and what it printed."""
        return answers.run_answer(await bench.run(argv, stdin=stdin, cwd=cwd or None, timeout=timeout))

    async def shell(code: str, timeout: Timeout = TIMEOUT) -> CallToolResult:
        """Run code in the sandbox's bash. Directory, variables, functions and jobs stay for the next call."""
        return answers.run_answer(await bench.run_shell(code, timeout=timeout))

    async def python(code: str, timeout: Timeout = TIMEOUT) -> CallToolResult:
        """Run code in the sandbox's Python. Variables stay; the value of the last line comes back."""
        return answers.run_answer(await bench.run_python(code, timeout=timeout))

    return [run, shell, python]


def _reading_tools(bench: Workbench) -> list[Tool[...]]:
    async def read(
        path: Annotated[str, Field(description="a file, or run:NUMBER/stdout and run:NUMBER/stderr")],
        offset: Annotated[int, Field(ge=0)] = 0,
        length: Annotated[int, Field(gt=0, le=answers.MOST_READ)] = answers.MOST_READ,
    ) -> CallToolResult:
        """Read a part of a file in the sandbox, or of what an earlier run printed."""
        if path.startswith(answers.OUTPUT):
            number, _, stream = path.removeprefix(answers.OUTPUT).partition("/")
            if not number.isdecimal() or len(number) > MOST_DIGITS or stream not in ("stdout", "stderr"):
                raise PolicyError(
                    f"{path[:80]!r} is not the output of a run", hint="write run:1/stdout; a file: ./run:1"
                )
            whole = answers.output_of(bench.past_run(int(number)).result, stream)
            return answers.content(path, whole[offset : offset + length], offset, len(whole))
        files = (await bench.box()).files
        size = (await files.info(path)).size
        data = await files.read(path, offset=offset, length=length)
        return answers.content(path, data, offset, max(size, offset + len(data)))

    async def list(path: Path = ".") -> CallToolResult:
        """List a directory of the sandbox."""
        return answers.listing(await (await bench.box()).files.list(path))

    async def search(
        pattern: Annotated[str, Field(description="such as **/*.py; ** stands for any directories")],
        path: Path = ".",
    ) -> CallToolResult:
        """Find files of the sandbox by their names."""
        return answers.listing(await (await bench.box()).files.search(pattern, path))

    async def diff(
        paths: Annotated[Sequence[str] | None, Field(description="only at and below these")] = None,
    ) -> CallToolResult:
        """Show what commands have changed so far, compared with the user's files."""
        workspace = await bench.workspace()
        found = await asyncio.to_thread(workspace.diff, paths)
        return answers.changes(found, workspace.id)

    async def policy() -> CallToolResult:
        """Show the policy of the sandbox: what commands can see, change, reach and use."""
        return answers.policy(bench.found)

    async def explain(
        run: Annotated[int | None, Field(description="the number of a run; default: the last one")] = None,
    ) -> CallToolResult:
        """Explain how a run ended: what was refused, by which clause, and what was enforced."""
        return answers.explanation(bench.past_run(run))

    return [read, list, search, diff, policy, explain]


def _changing_tools(bench: Workbench) -> list[Tool[...]]:
    async def write(
        path: Path,
        content: str,
        encoding: Literal["utf-8", "base64"] = "utf-8",
        append: bool = False,
    ) -> CallToolResult:
        """Write a file in the sandbox; missing directories are made. The user's own file stays as it is."""
        files = (await bench.box()).files
        try:
            data = content.encode() if encoding == "utf-8" else base64.b64decode(content, validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise PolicyError(f"the content is not {encoding}: {error}", hint="encode it again") from None
        await (files.append if append else files.write)(path, data, parents=True)
        return answers.words(f"{'appended' if append else 'wrote'} {len(data)} bytes to {clean_line(path)}")

    async def discard() -> CallToolResult:
        """Delete all changes, with their snapshots, and end everything that runs in the sandbox."""
        async with bench.closed() as workspace:
            await asyncio.to_thread(workspace.discard)
        return answers.words("all changes are gone; the sandbox begins with the user's files again")

    async def snapshot(
        snapshot: Annotated[str, Field(description="its name; default: a number")] = "",
    ) -> CallToolResult:
        """Save the present changes, to return to them with `restore`."""
        workspace = await bench.workspace()
        made = await asyncio.to_thread(workspace.snapshot, snapshot or None)
        return answers.words(f"snapshot {made.name}")

    async def restore(snapshot: str) -> CallToolResult:
        """Return to the changes of a snapshot. Later changes are lost; what runs in the sandbox is ended."""
        async with bench.closed() as workspace:
            await asyncio.to_thread(workspace.restore, snapshot)
        return answers.words(f"the changes are those of snapshot {clean_line(snapshot)}")

    return [write, discard, snapshot, restore]


class Consent(BaseModel):
    """What the user answers."""

    commit: bool = Field(description="Apply these changes to your files?")


class CommitProposal(NamedTuple):
    """What a commit would do, with the digest of the changes that it is about."""

    found: Diff
    workspace: str
    paths: tuple[str, ...] | None


def _commit_tool(bench: Workbench) -> Tool[...]:
    async def review(ctx: Context, paths: Sequence[str] | None) -> CommitProposal:
        try:
            _require_elicitation(ctx, bench.workspace_id)
            async with bench.closed() as workspace:
                found = await asyncio.to_thread(workspace.diff, paths)
            _require_readable(found, workspace.id)
        except StockadeError as error:
            raise _tool_error(error) from error
        return CommitProposal(found, workspace.id, None if paths is None else tuple(paths))

    async def consent(review: Annotated[CommitProposal, Resolve(review)]) -> Elicit[Consent]:
        return Elicit(question(review), Consent)

    async def commit(
        review: Annotated[CommitProposal, Resolve(review)],
        consent: Annotated[ElicitationResult[Consent], Resolve(consent)],
        paths: Annotated[Sequence[str] | None, Field(description="only at and below these")] = None,
    ) -> CallToolResult:
        """Ask the user to apply the changes to the user's own files. Ends what runs in the sandbox.

        Files that tools of the host would run or obey are never applied this way.
        """
        if not isinstance(consent, AcceptedElicitation) or not consent.data.commit:
            return answers.words("the user did not agree; nothing was applied", error=True)
        async with bench.closed() as workspace:
            done = await asyncio.to_thread(workspace.commit, review.paths, expect=review.found.digest)
        held = [f"held back: {clean_line(one.path)}: {clean_line(one.detail)}" for one in done.held]
        return answers.words(f"applied {len(done.changes)} changes to {clean_line(workspace.path)}", *held)

    return commit


def _require_elicitation(ctx: Context, workspace: str) -> None:
    """Refuse if the client cannot ask its user: nobody else may agree."""
    known = ctx.client_capabilities
    if known is None or known.elicitation is None:
        raise PolicyError(
            "your client cannot ask the user (no elicitation), and without the user nothing is applied",
            hint=f"the user can type: stockade diff {workspace}; stockade commit {workspace}",
        )


def _require_readable(found: Diff, workspace: str) -> None:
    """Refuse what a question cannot show in full: what the user does not see never lands."""
    if not any(not one.held for one in found.files):
        raise NotFoundError(
            "there are no changes to apply" + (" but those that are held back" if found.files else ""),
            hint=f"the user types: stockade diff {workspace}" if found.files else "",
        )
    if found.cut or len(found.files) > MOST_ASKED:
        raise PolicyError(
            f"there are more changes than a question can show: {found.cut or len(found.files)}",
            hint=f"name some paths; the user types: stockade diff {workspace}; stockade commit {workspace}",
        )


def question(review: CommitProposal) -> str:
    """Return what the user is asked. The digest makes changed contents another question."""
    found, held = review.found, [one for one in review.found.files if one.held]
    lines = [
        f"Apply {len(found.files) - len(held)} changes to your files? (+{found.added} -{found.removed} lines)"
    ]
    lines += answers.change_lines(found.files)
    if held:
        lines.append(f"{len(held)} of these are held back: they stay aside until you commit them yourself")
    lines.append(f"To read them first: stockade diff {review.workspace} (state {found.digest[:16]})")
    return "\n".join(lines)
