"""No answer that a program or a model reads tells which files the host has.

Each face is asked about something that exists on the host and that the policy does not show, and about a name
beside it that does not exist. After the name itself is replaced, both answers must be equal. The control is
`advise=True`, with which a person gets words that differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import stockade
from stockade import AsyncSandbox, Policy, Sandbox
from stockade.errors import StockadeError
from stockade.loop.items.item import WorkItem
from support.installs import SYSTEM_PATH
from support.loops import make_project, run_loop
from support.mcp_client import Client, server_process
from support.paths import ROOT
from support.screen import STOCKADE
from support.server import ServerUnderTest, module_server

PYTHON = "/usr/bin/python3"
DELEGATE = (ROOT / "src/stockade/inside/delegate_request.py").read_text()
#: Asks for a sandbox for each line of its input, and prints the answers.
ASKER = (
    DELEGATE
    + """
import sys
for line in sys.stdin:
    asked = json.loads(line)
    try:
        given = vars(delegate(asked["command"], asked["policy"], cwd=asked["cwd"]))
        given = {name: str(value) for name, value in given.items() if name != "receipt"}
    except (PermissionError, ConnectionError) as error:
        given = {"refused": str(error)}
    print(json.dumps(given), flush=True)
"""
)


class Twins(NamedTuple):
    """Something of the host that no policy shows, and a name beside it that the host does not have."""

    there: str
    missing: str


class Use(NamedTuple):
    """A command that names a path of the host."""

    argv: list[str]
    cwd: str = ""

    @property
    def line(self) -> str:
        """The same for a shell."""
        words = shlex.join(self.argv)
        return f"cd {shlex.quote(self.cwd)} && {words}" if self.cwd else words


class HostFiles(NamedTuple):
    """The host of these tests, and the project whose directory is all that a policy shows."""

    home: Path
    project: Path

    @property
    def twins(self) -> list[Twins]:
        """A file, a program, a directory, a link to a secret, a secret, a command by its name, a module."""
        beside = {
            "notes.txt": "nates.txt", "bin/tool": "bin/toil", "dir": "dor", "link": "lonk",
            ".ssh/id_mine": ".ssh/id_mane",
        }  # fmt: skip
        found = [Twins(f"{self.home}/{one}", f"{self.home}/{other}") for one, other in beside.items()]
        return [*found, Twins("tool", "toil"), Twins("known_module", "knawn_module")]

    @property
    def few(self) -> list[Twins]:
        """A file, a directory, a link to a secret and a command by its name: for faces that take longer."""
        return [self.twins[index] for index in (0, 2, 3, 5)]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostFiles:
    home, project = tmp_path / "home", tmp_path / "project"
    packages = ".local/lib/python3/site-packages"
    for directory in (".ssh", "bin", "dir", packages):
        (home / directory).mkdir(parents=True)
    for file in ("notes.txt", ".ssh/id_mine", f"{packages}/known_module.py"):
        (home / file).write_text("private\n")
    (home / "bin/tool").write_text("#!/bin/sh\necho private\n")
    (home / "bin/tool").chmod(0o755)
    (home / "link").symlink_to(".ssh/id_mine")
    project.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{SYSTEM_PATH}:{home}/bin")
    monkeypatch.setenv("PYTHONPATH", str(home / packages))
    return HostFiles(home, project)


def uses(path: str) -> list[Use]:
    """The places in a command where a model can name a path, a command or a module."""
    if "module" in path:
        return [Use([PYTHON, "-c", f"import {path}"])]
    if "/" not in path:
        return [Use([path])]
    arguments = [Use(["cat", path]), Use(["sh", path]), Use(["touch", f"{path}/x"])]
    return [Use([path]), Use(["true"], cwd=path), *arguments]


def differing(twins_of: list[Twins], ask: Callable[[str], list[str]]) -> list[tuple[str, str, str]]:
    """Ask about both twins of each kind, and return the answers that differ by more than the name."""
    found = []
    for twins in twins_of:
        answers = zip(ask(twins.there), ask(twins.missing), strict=True)
        for one, other in answers:
            same_name = other.replace(os.path.basename(twins.missing), os.path.basename(twins.there))
            if _plain(one) != _plain(same_name):
                found.append((twins.there, one, other))
    return found


#: Numbers that no two runs share: those of runs, times, sizes, ids and workspaces.
_NUMBERS = re.compile(r"\b(?:0x)?[0-9a-f]{12,}\b|[0-9]+(?:\.[0-9]+)?")


def _plain(answer: str) -> str:
    """Return an answer without what differs between any two runs."""
    return _NUMBERS.sub("#", answer)


def test_the_control_a_person_who_asks_is_told_what_the_host_has(host: HostFiles) -> None:
    with Sandbox(Policy(workspace=str(host.project)), on_exit="discard") as box:

        def ask(advise: bool) -> Callable[[str], list[str]]:
            def each(path: str) -> list[str]:
                done = [box.run(one.argv, cwd=one.cwd or None, advise=advise) for one in uses(path)]
                return [f"{one.reason}\n{one.hint}\n{_checked(one)}\n{one.stderr_text}" for one in done]

            return each

        told = {Path(there).name for there, *_ in differing(host.twins, ask(advise=True))}
        assert told == {"notes.txt", "tool", "dir", "link", "id_mine", "known_module"}
        assert differing(host.twins, ask(advise=False)) == []


def _checked(result: stockade.Result) -> str:
    try:
        return str(result.check())
    except StockadeError as error:
        return f"{error}\n{error.hint}\n{getattr(error, '__notes__', '')}"


def test_mcp(host: HostFiles) -> None:
    async def asked() -> list[tuple[str, str, str]]:
        async with Client(server_process(host.project)) as client:

            async def each(path: str) -> list[str]:
                found = []
                for one in uses(path):
                    found.append(str(await client.call_tool("run", {"argv": one.argv, "cwd": one.cwd})))
                found.append(str(await client.call_tool("explain", {})))
                found.append(str(await client.call_tool("shell", {"code": uses(path)[-1].line})))
                for tool, argument in (
                    ("read", "path"),
                    ("list", "path"),
                    ("search", "path"),
                    ("diff", "paths"),
                ):
                    value: Any = [path] if argument == "paths" else path
                    more = {"pattern": "*"} if tool == "search" else {}
                    found.append(str(await client.call_tool(tool, {argument: value, **more})))
                return found

            answers = {one: await each(one) for twins in host.twins for one in twins}
            return differing(host.twins, answers.__getitem__)

    assert asyncio.run(asked()) == []


def test_the_hook_and_the_shell_prefix(host: HostFiles) -> None:
    environ = {**os.environ, "PATH": f"{SYSTEM_PATH}:{host.home}/bin"}

    def ask(path: str) -> list[str]:
        done = [
            subprocess.run(
                words, cwd=host.project, env=environ, capture_output=True, text=True, timeout=60, check=False
            )
            for words in ([STOCKADE, "hook", "run", "--", path], [f"{STOCKADE}-shell", f"cat {path}"])
        ]
        return [f"{one.returncode}\n{one.stdout}\n{one.stderr}" for one in done]

    assert differing(host.few, ask) == []
    observed = [STOCKADE, "hook", "run", "--explain", "--", f"cat {host.twins[0].there}"]
    done = subprocess.run(observed, cwd=host.project, capture_output=True, text=True, timeout=60, check=False)
    assert "unknown option --explain" in done.stderr


def test_a_sandbox_that_cannot_be_made(host: HostFiles) -> None:
    """Where programs write for real, they can replace what the policy names by a link to anything."""
    policy, planted = host.project.parent / "policy.toml", host.project / "data"
    policy.write_text(
        f'read = ["{planted}"]\nunprotect = [".envrc", ".vscode", ".claude"]\n'
        f'workspace = {{path = "{host.project}", mode = "rw"}}\n'
    )

    def said(*words: str) -> str:
        done = subprocess.run(
            [STOCKADE, *words], cwd=host.project, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stderr

    async def mcp() -> str:
        async with Client(server_process(host.project, "-p", str(policy))) as client:
            return str(await client.call_tool("run", {"argv": ["true"]}))

    def ask(path: str) -> list[str]:
        planted.unlink(missing_ok=True)
        planted.symlink_to(path)
        assert Path(path).name in said("run", "-p", str(policy), "--", "true")  # the control
        return [said("hook", "run", "-p", str(policy), "--", "true"), asyncio.run(mcp())]

    (link,) = (one for one in host.twins if one.there.endswith("/link"))
    assert differing([link], ask) == []
    assert "id_mine" not in str(ask(link.there))


def test_delegation(host: HostFiles) -> None:
    policy = Policy(read=["/usr/lib"], delegate=True)

    def ask(path: str) -> list[str]:
        read = {"read": [path] if path.startswith("/") else []}
        wanted = [(one, {}) for one in uses(path)] + [(Use(["true"]), read)]
        lines = [
            json.dumps({"command": one.argv, "cwd": one.cwd, "policy": policy}) for one, policy in wanted
        ]
        result = stockade.run([PYTHON, "-c", ASKER], policy, input="\n".join(lines))
        assert result.ok, result.stderr_text
        return result.text.splitlines()

    assert differing(host.few, ask) == []


def test_the_feedback_of_a_loop(host: HostFiles, tmp_path: Path) -> None:
    """The agent leads a link and git's own file to the path; the judge's command reads and runs them."""
    agent = 'ln -s "$0" here; printf "gitdir: %s\\n" "$0" > .git; echo a=2 > values.sh'
    prompts: list[str] = []

    def ask(path: str) -> list[str]:
        project = make_project(tmp_path / f"loop-{len(prompts)}")
        done = run_loop(
            project, ["sh", "-c", agent, path], (WorkItem(id="a", title="Set a"),), attempts=2,
            verify="cat here; ./here; git status; sh tests/check.sh",
        )  # fmt: skip
        directory = done.loop.store.attempt_directory("a", 2)
        text = Path(directory, "prompt.md").read_text().partition("## The attempt before")[2]
        prompts.append(text)
        assert text, done.reasons("a")
        # Two pipes carry what the judge prints: the order of their lines is no answer.
        return ["\n".join(sorted(text.replace(str(project), "PROJECT").splitlines()))]

    assert differing(host.few[1:3], ask) == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


def test_the_server(host: HostFiles, server: ServerUnderTest) -> None:
    from stockade.client import Client as ServerClient

    def told(call: Callable[..., object], *words: Any, **options: Any) -> str:
        try:
            return repr(call(*words, **options))
        except (StockadeError, OSError) as error:
            return f"{type(error).__name__} {error} {getattr(error, 'hint', '')}"

    with (
        ServerClient(f"127.0.0.1:{server.port}", key=server.key) as client,
        client.create(timeout=600) as box,
    ):

        def ask(path: str) -> list[str]:
            found = [
                told(lambda one: _parts(box.run(one.line, cwd=one.cwd or None)), one) for one in uses(path)
            ]
            found += [told(call, path) for call in (box.files.read, box.files.info, box.files.list)]
            refused = [
                server.create(image={"uri": path}),
                server.create(volumes=[{"name": "v", "host": {"path": path}, "mountPath": "/mnt"}]),
                server.create(policy={"read": [path]}),
            ]
            assert all(400 <= one.status_code < 600 for one in refused)
            found += [f"{one.status_code} {one.text}" for one in refused]
            return found

        assert differing(host.few, ask) == []


def _parts(result: Any) -> tuple[object, ...]:
    return result.outcome, result.exit_code, result.reason, result.stdout, result.stderr


Exec = Callable[[Use], Awaitable[object]]


@contextlib.asynccontextmanager
async def deepagents(project: Path) -> Any:
    from stockade.integrations.deepagents import StockadeBackend

    with Sandbox(Policy(workspace=str(project)), on_exit="discard") as box:
        backend = StockadeBackend(box)

        async def execute(use: Use) -> object:
            return backend.execute(use.line), backend.download_files([use.argv[-1]])

        yield execute
        box.files.close()


@contextlib.asynccontextmanager
async def mini_swe_agent(project: Path) -> Any:
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from stockade.integrations.mini_swe_agent import StockadeEnvironment

    made = StockadeEnvironment(policy={"workspace": str(project)}, on_exit="discard")

    async def execute(use: Use) -> object:
        try:
            return made.execute({"command": shlex.join(use.argv)}, use.cwd)
        except StockadeError as error:
            return f"{error} {error.hint}"

    yield execute
    made.cleanup()


@contextlib.asynccontextmanager
async def openai_agents(project: Path) -> Any:
    from stockade.integrations.openai_agents import StockadeSandboxClient, shell_executor

    client = StockadeSandboxClient(Policy(workspace=str(project)), on_exit="discard")
    session = await client.create()
    async with session, AsyncSandbox(Policy(workspace=str(project)), on_exit="discard") as box:
        shell = shell_executor(box)

        async def told(work: Awaitable[object]) -> str:
            try:
                return repr(await work)
            except Exception as error:  # the SDK has an error of its own for each kind
                return f"{error!r} {error.__cause__!r}"

        async def execute(use: Use) -> object:
            action = SimpleNamespace(commands=[use.line], timeout_ms=None, max_output_length=None)
            request = SimpleNamespace(data=SimpleNamespace(action=action))
            path = Path(use.argv[-1])
            return (
                await told(shell(request)),  # type: ignore[arg-type]
                await told(session.exec(*use.argv, shell=False)),
                await told(session.read(path)),
            )

        yield execute


@contextlib.asynccontextmanager
async def pydantic_ai(project: Path) -> Any:
    from stockade.integrations.pydantic_ai import StockadeWorkspace

    workspace = StockadeWorkspace(Policy(workspace=str(project)))

    async def execute(use: Use) -> object:
        found = [await workspace.run(use.argv), await workspace.run(use.line, shell=True)]
        path = use.argv[-1]
        for call in (workspace.read_bytes, workspace.stat, workspace.list_dir):
            try:
                found.append(await call(path))  # type: ignore[arg-type]
            except (OSError, ValueError) as error:
                found.append(f"{error!r} {getattr(error, 'hint', '')}")  # type: ignore[arg-type]
        return [*found, await workspace.realpath(path)]

    yield execute
    await workspace.destroy()


@contextlib.asynccontextmanager
async def inspect_ai(project: Path) -> Any:
    from stockade.integrations.inspect_ai import StockadeSandboxEnvironment

    made = await StockadeSandboxEnvironment.sample_init("oracle", None, {})
    box = made["default"].as_type(StockadeSandboxEnvironment)

    async def execute(use: Use) -> object:
        found: list[object] = []
        for work in (box.exec(use.argv, cwd=use.cwd or None), box.read_file(use.argv[-1])):
            try:
                found.append(await work)
            except Exception as error:  # Inspect has an error of its own for each kind
                found.append(f"{error!r} {getattr(error, 'hint', '')}")
        return found

    yield execute
    await StockadeSandboxEnvironment.sample_cleanup("oracle", None, made, interrupted=False)


@pytest.mark.parametrize(
    "adapter",
    [deepagents, mini_swe_agent, openai_agents, pydantic_ai, inspect_ai],
    ids=lambda one: one.__name__,
)
def test_adapters(host: HostFiles, adapter: Any) -> None:
    async def asked() -> list[tuple[str, str, str]]:
        async with adapter(host.project) as execute:
            answers = {
                one: [repr(await execute(use)) for use in uses(one)] for twins in host.few for one in twins
            }
            return differing(host.few, answers.__getitem__)

    assert asyncio.run(asked()) == []
