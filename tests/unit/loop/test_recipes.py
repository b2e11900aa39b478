"""Which recipe a command gets, what it adds to a policy, and where the switch that skips questions can go."""

from __future__ import annotations

import ast
import shlex

import pytest

from stockade import Policy
from stockade.loop.recipes.recipe import AgentError, recipe_for
from support.paths import ROOT

#: What makes each agent run everything without asking.
SWITCHES = (
    "--dangerously-skip-permissions",
    "--dangerously-bypass-approvals-and-sandbox",
    "--yolo",
    "--yes-always",
)
PACKAGE = ROOT / "src" / "stockade"


def started(*argv: str) -> list[str]:
    """Return the command that the description names."""
    return shlex.split(recipe_for(argv).describe().removeprefix("inside the sandbox: "))


@pytest.mark.parametrize(
    ("argv", "name", "prompt", "command"),
    [
        (
            ["claude", "--model", "opus"], "claude-code", "stdin",
            "claude -p --dangerously-skip-permissions --output-format stream-json --verbose --model opus",
        ),
        (
            ["/opt/bin/claude", "-p", "{prompt}"], "claude-code", "argument",
            "/opt/bin/claude --dangerously-skip-permissions --output-format stream-json --verbose -p PROMPT",
        ),
        (
            ["codex", "-m", "gpt-5"], "codex", "stdin",
            "codex exec --json --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check -m gpt-5 -",
        ),
        (
            ["codex", "exec", "{prompt}"], "codex", "argument",
            "codex exec --json --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check PROMPT",
        ),
        (["gemini"], "gemini-cli", "stdin", "gemini --yolo --output-format stream-json"),
        (
            ["aider", "--model", "sonnet"], "aider", "file",
            "aider --yes-always --message-file /tmp/stockade-prompt.md --no-pretty --no-auto-commits "
            "--no-gitignore --chat-history-file /tmp/aider--chat-history --input-history-file "
            "/tmp/aider--input-history --model sonnet",
        ),
        (["./agent.sh"], "command", "stdin", "./agent.sh"),
        (["./agent.sh", "--in={prompt_file}"], "command", "file", "./agent.sh --in=/tmp/stockade-prompt.md"),
    ],
)  # fmt: skip
def test_a_command_gets_the_recipe_of_its_program(
    argv: list[str], name: str, prompt: str, command: str
) -> None:
    recipe = recipe_for(argv)
    assert (recipe.name, recipe.prompt) == (name, prompt)
    assert started(*argv) == command.split()
    assert recipe.key


def test_what_the_user_has_typed_is_not_said_twice() -> None:
    typed = ["claude", "--print", "--dangerously-skip-permissions", "--output-format=json"]
    assert started(*typed) == typed
    assert started("gemini", "-y", "-o", "json") == ["gemini", "-y", "-o", "json"]


def test_no_command_is_an_error_that_says_where_it_goes() -> None:
    with pytest.raises(AgentError, match="no agent is named") as raised:
        recipe_for([])
    assert "-- claude" in raised.value.hint


def test_a_recipe_adds_the_agents_files_key_and_hosts_to_a_policy_and_takes_nothing_away() -> None:
    mine = Policy(
        workspace=".", read=["/opt/data"], net=["db.example.com:5432"], env={"IS_SANDBOX": "no", "CI": "1"},
        limits={"memory": "2G"},
    )  # fmt: skip
    both = recipe_for(["claude"]).extend(mine)
    assert both.read[0] == "/opt/data" and "~/.claude/settings.json?" in both.read
    assert both.net == ("db.example.com:5432", "* https://api.anthropic.com/**")
    assert both.secrets["ANTHROPIC_API_KEY"].hosts == ("api.anthropic.com",) and not both.pass_env
    assert ".env" in both.deny
    assert both.env["IS_SANDBOX"] == "no" and both.env["CI"] == "1" and "DISABLE_AUTOUPDATER" in both.env
    assert both.limits == mine.limits and both.workspace == mine.workspace


def test_an_open_network_stays_open_and_a_plain_command_adds_nothing() -> None:
    opened = recipe_for(["claude"]).extend(Policy(net="open"))
    assert opened.net == "open" and opened.pass_env == ("ANTHROPIC_API_KEY",) and not opened.secrets
    assert "is passed inside" in recipe_for(["claude"]).describe_key(opened)
    assert "stays outside" in recipe_for(["claude"]).describe_key(recipe_for(["claude"]).extend(Policy()))
    own = recipe_for(["claude"]).extend(Policy(pass_env=["ANTHROPIC_API_KEY"]))
    assert own.pass_env == ("ANTHROPIC_API_KEY",) and not own.secrets
    assert recipe_for(["./agent.sh"]).extend(Policy(workspace=".")) == Policy(workspace=".")


def functions_with(words: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return every function of the package whose code, not its docstring, has one of these words."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if not any(word in path.read_text() for word in words):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                inner = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.FunctionDef)]
                texts = [
                    one.value
                    for statement in inner
                    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                    for one in ast.walk(statement)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
                if any(word in text for word in words for text in texts):
                    name = getattr(node, "name", "")
                    found.add((path.relative_to(PACKAGE).as_posix(), name))
    return {one for one in found if one[1]}


def calls_in(node: ast.AST) -> list[str]:
    return [ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]


def test_the_switches_are_in_one_place_and_lead_into_an_open_sandbox_alone() -> None:
    place = "loop/recipes/recipe.py"
    assert functions_with(SWITCHES) == {(place, name) for name in ("_claude", "_codex", "_gemini", "_aider")}
    # Nobody but `_with_switches` calls those, and nobody but the recipe calls that.
    users = [path for path in PACKAGE.rglob("*.py") if "_with_switches" in path.read_text()]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == [place]
    tree = ast.parse((PACKAGE / place).read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    callers = {name for name, node in functions.items() if "_with_switches" in calls_in(node)}
    assert callers == {"describe", "_prepare"}, "one makes text for people, the other is given the sandbox"
    assert isinstance(functions["describe"].returns, ast.Name) and functions["describe"].returns.id == "str"
    starters = {name: node for name, node in functions.items() if "self._prepare" in calls_in(node)}
    bodies = {name: ast.unparse(node.body[-1]) for name, node in starters.items()}
    assert bodies == {
        "start": "return box.start(self._prepare(box, prompt), **options)",
        "run": "return box.run(self._prepare(box, prompt), **options)",
    }
    first = functions["_prepare"].body[1]
    assert ast.unparse(first).startswith("if not isinstance(box, Sandbox) or box.gate is None:\n    raise")
