"""The tools of `stockade mcp`, through the SDK's client, in this process."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from stockade import Policy
from stockade.integrations.mcp.workbench import Workbench
from stockade.resolve.discovery import PolicySource
from support.mcp_client import MODES, Answers, connected, refusal, text, until, workbench

TOOLS = {
    "run", "shell", "python", "read", "write", "list", "search", "diff", "discard", "snapshot", "restore",
    "policy", "explain",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project."""
    (tree := tmp_path / "tree").mkdir()
    (tree / "a.txt").write_text("one\n")
    return tree


@pytest.mark.parametrize("mode", MODES)
async def test_commands_and_code_run_inside_and_their_state_stays(mode: str, tree: Path) -> None:
    bench = workbench(tree)
    async with connected(bench, mode=mode) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == TOOLS
        assert not bench.is_open, "nothing so far needed the sandbox"
        found = await text(client, "run", argv=["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in")
        assert found == "run 1: exit code 3\nstdout:\nin\nstderr:\nerr\n"
        await text(client, "shell", code="cd /usr; greet() { echo hello; }")
        assert "stdout:\n/usr\nhello\n" in await text(client, "shell", code="pwd; greet")
        await text(client, "python", code="x = 20")
        assert "value:\n41" in await text(client, "python", code="2 * x + 1")
        assert "ZeroDivisionError" in await text(client, "python", code="1 / 0")


async def test_files_are_those_of_the_sandbox_and_changes_are_kept_aside(tree: Path) -> None:
    async with connected(workbench(tree)) as client:
        await text(client, "write", path="new/b.txt", content="héllo\n")
        await text(client, "write", path="new/b.txt", content="more\n", append=True)
        await text(
            client, "write", path="raw", content=base64.b64encode(b"\0\xff").decode(), encoding="base64"
        )
        assert "not base64" in await refusal(client, "write", path="raw", content="!", encoding="base64")
        assert (await text(client, "read", path="new/b.txt")).endswith("\nhéllo\nmore\n")
        assert "AP8=" in await text(client, "read", path="raw")
        assert "bytes 1 to 3 of 4" in await text(client, "read", path="a.txt", offset=1, length=2)
        assert "a.txt" in await text(client, "list") and "new/b.txt" in await text(
            client, "search", pattern="**/*.txt"
        )
        assert "no such file" in await refusal(client, "read", path="/etc/shadow")
        found = await text(client, "diff")
        assert "added     new/b.txt" in found and "+héllo" in found
        assert "b.txt" not in await text(client, "diff", paths=["raw"])
    assert sorted(path.name for path in tree.iterdir()) == ["a.txt"]


async def test_a_snapshot_brings_changes_back_and_discard_removes_all(tree: Path) -> None:
    async with connected(workbench(tree)) as client:
        await text(client, "shell", code="echo two > a.txt")
        assert "snapshot good" in await text(client, "snapshot", snapshot="good")
        await text(client, "shell", code="echo three > a.txt; touch junk")
        await text(client, "restore", snapshot="good")
        assert "two" in await text(client, "shell", code="cat a.txt; ls")
        assert "junk" not in await text(client, "list")
        assert "'bad'" in await refusal(client, "restore", snapshot="bad")
        await text(client, "discard")
        assert "one" in await text(client, "shell", code="cat a.txt")
        assert "no changes" in await text(client, "diff")


async def test_long_output_is_bounded_and_the_rest_can_be_read(tree: Path) -> None:
    bench = workbench(tree, limits={"output": "300K"})
    async with connected(bench) as client:
        found = await text(client, "run", argv=["seq", "40000"])
        assert len(found) < 32_000 and "1\n2\n" in found and "40000\n" in found
        assert "path 'run:1/stdout'" in found
        assert "\n20000\n" in await text(client, "read", path="run:1/stdout", offset=100_000, length=50_000)
        assert "not the output" in await refusal(client, "read", path="run:1/stdin")
        assert "run 7 is not known" in await refusal(client, "read", path="run:7/stdout")
        found = await text(client, "run", argv=["seq", "100000"])
        path = found.partition("more bytes are in the file ")[2].split()[0]
        assert Path(path).read_bytes().endswith(b"100000\n")
        escapes = await text(client, "run", argv=["printf", r"\033]0;title\007"])
        assert "\x1b" not in escapes and r"\x1b]0;title\x07" in escapes


async def test_explain_says_what_refused_a_run_and_what_was_enforced(tree: Path) -> None:
    async with connected(workbench(tree, limits={"wall": "5s"})) as client:
        assert "nothing was run" in await refusal(client, "explain")
        await text(
            client,
            "run",
            argv=["python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 80))"],
        )
        found = await text(client, "explain")
        assert "outcome: exited, exit code 1" in found and "--net" in found
        assert "enforced: network.none by own network namespace" in found and "receipt: " in found
        await refusal(client, "run", argv=["sleep", "60"], timeout=0.2)
        assert "outcome: timed-out" in await text(client, "explain")
        assert "exit code 1" in await text(client, "explain", run=1)
        await refusal(client, "run", argv=["no-such-program"])
        assert "setup-failed" in await text(client, "explain")


async def test_explain_names_the_host_that_no_rule_allows(tree: Path) -> None:
    async with connected(workbench(tree, net=["api.example.com:443"])) as client:
        code = "import socket; socket.getaddrinfo('evil.example', 443)"
        found = await text(client, "run", argv=["python3", "-c", code])
        assert "refused: name evil.example" in found
        found = await text(client, "explain")
        assert "refused: name evil.example" in found and "by network.rules" in found
        assert "would be allowed by: " in found


async def test_policy_shows_what_applies(tree: Path) -> None:
    async with connected(workbench(tree, net=["api.example.com:443"])) as client:
        found = await text(client, "policy")
        assert 'net = ["api.example.com:443"]' in found and str(tree) in found and "# network.rules" in found


async def test_policy_names_no_value_nothing_denied_and_no_place_of_a_secret(tree: Path) -> None:
    """The answer goes to a model, and from there to its provider; programs inside are told no more either."""
    clauses: dict[str, Any] = {
        "env": {"DATABASE_URL": "postgres://hunter2@db"},
        "deny": ["hidden-plans/**"],
        "net": ["*.example.org", "!rival.example.org", "GET https://api.example.com/**"],
        "secrets": {"TOKEN": {"from_file": "/etc/vault-token", "hosts": ["api.example.com"]}},
    }
    async with connected(workbench(tree, **clauses)) as client:
        found = await text(client, "policy")
    for word in ("hunter2", "hidden-plans", "rival", "vault-token"):
        assert word not in found
    for word in (
        '"DATABASE_URL"',
        '"*.example.org"',
        "TOKEN",
        "1 paths",
        "1 rules",
        "# network.rules: net\n",
    ):
        assert word in found


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_call_ends_its_command_and_nothing_else(mode: str, tree: Path) -> None:
    async with connected(workbench(tree), mode=mode) as client:
        await text(client, "shell", code="kept=yes")
        code = "trap 'touch ended; exit' TERM; touch began; sleep 77 & wait"
        call = asyncio.create_task(client.call_tool("run", {"argv": ["sh", "-c", code]}))
        await _until_listed(client, "began")
        call.cancel()
        await _until_listed(client, "ended")
        assert "stdout:\nyes\n" in await text(client, "shell", code="echo $kept; pgrep -f 'sleep 77'")


async def _until_listed(client: Client, name: str) -> None:
    """Wait until a file exists inside."""
    async with asyncio.timeout(60):
        while name not in await text(client, "list"):
            await asyncio.sleep(0.05)


async def test_an_idle_sandbox_is_closed_and_opened_again_over_its_changes(tree: Path) -> None:
    bench = workbench(tree)
    async with connected(bench) as client:
        watch = asyncio.create_task(bench.close_when_idle(0.2))
        await text(client, "shell", code="echo two > a.txt; sleep 1; echo done > b.txt")
        await until(lambda: not bench.is_open)
        watch.cancel()
        assert "two\ndone" in await text(client, "shell", code="cat a.txt b.txt")


async def test_changes_that_nobody_wants_are_deleted_at_the_end_and_not_before(
    tree: Path, stockade_home: Path
) -> None:
    bench = Workbench(PolicySource(Policy(workspace=str(tree)), ()), discard=True)
    async with connected(bench) as client:
        await text(client, "shell", code="echo two > a.txt")
        await text(client, "snapshot", snapshot="good")
        await text(client, "restore", snapshot="good")
        assert "two" in await text(client, "shell", code="cat a.txt")
        await bench.end()
    assert os.listdir(stockade_home / "workspaces") == []


async def test_without_an_overlay_there_is_nothing_to_discard_or_restore(tree: Path) -> None:
    bench = Workbench(PolicySource(Policy(workspace={"path": str(tree), "mode": "ro"}), ()))
    async with connected(bench) as client:
        for tool, arguments in (
            ("discard", {}),
            ("restore", {"snapshot": "x"}),
            ("diff", {}),
            ("snapshot", {}),
        ):
            assert "no overlay workspace" in await refusal(client, tool, **arguments)


async def test_a_sandbox_that_somebody_killed_is_opened_again(tree: Path) -> None:
    bench = workbench(tree)
    async with connected(bench) as client:
        await text(client, "write", path="b.txt", content="kept")
        (await bench.box())._require_open()[0].connection.stop()
        await until(lambda: bench._box is None or bench._box.gate is None or _ended(bench._box.gate))
        assert (await text(client, "read", path="b.txt")).endswith("kept")


def _ended(gate: int) -> bool:
    import select

    return bool(select.select([gate], [], [], 0)[0])


@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_asks_the_user_and_names_what_is_held_back(mode: str, tree: Path) -> None:
    user = Answers()
    async with connected(workbench(tree), mode=mode, user=user, allow_commit=True) as client:
        assert "no changes" in await refusal(client, "commit")
        await text(client, "write", path=".envrc", content="evil\n")
        assert "held back" in await refusal(client, "commit") and user.questions == []
        await text(client, "write", path="a\nb", content="x")
        await text(client, "shell", code="echo two > a.txt")
        done = await text(client, "commit")
        (question,) = user.questions
        assert ".envrc: a commit holds it back: the policy protects .envrc" in question
        assert "a\\nb" in question and "modified  a.txt" in question
        assert "applied 2 changes" in done and "held back: .envrc" in done
        assert (tree / "a.txt").read_text() == "two\n" and not (tree / ".envrc").exists()
        assert ".envrc" in await text(client, "diff"), "it stays aside"


@pytest.mark.parametrize("user", [Answers("decline"), Answers("cancel"), Answers(commit=False)])
async def test_without_the_users_consent_nothing_is_applied(user: Answers, tree: Path) -> None:
    async with connected(workbench(tree), user=user, allow_commit=True) as client:
        await text(client, "shell", code="echo two > a.txt")
        assert "did not agree" in await refusal(client, "commit") and len(user.questions) == 1
    assert (tree / "a.txt").read_text() == "one\n"


async def test_a_commit_takes_only_the_named_paths(tree: Path) -> None:
    async with connected(workbench(tree), user=Answers(), allow_commit=True) as client:
        await text(client, "shell", code="echo two > a.txt; echo b > b.txt")
        await text(client, "commit", paths=["b.txt"])
        assert (tree / "a.txt").read_text() == "one\n" and (tree / "b.txt").read_text() == "b\n"
