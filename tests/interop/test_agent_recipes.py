"""The policies of the recipes, each with a program that behaves like its agent."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.means import need_program
from support.network import Internet
from support.paths import ROOT
from support.screen import STOCKADE

DOCUMENT = ROOT / "docs" / "how-to" / "agents.md"
RECIPES = ROOT / "src" / "stockade" / "loop" / "recipes" / "policies"
AGENT = ROOT / "tests" / "support" / "agent.py"
PYTHON = "/usr/bin/python3"
#: By recipe: a file of settings in the home, the variable that has the key, and the host of the model.
AGENTS = {
    "claude-code": (".claude/settings.json", "ANTHROPIC_API_KEY", "api.anthropic.com"),
    "codex": (".codex/config.toml", "CODEX_API_KEY", "api.openai.com"),
    "aider": (".aider.conf.yml", "ANTHROPIC_API_KEY", "api.anthropic.com"),
    "gemini-cli": (".gemini/settings.json", "GEMINI_API_KEY", "generativelanguage.googleapis.com"),
}
KEY = "sk-for-the-agent"


@pytest.fixture
def api(internet: Internet) -> Internet:
    """The hosts of the agents' models; they answer whoever has the key."""
    for _, _, host in AGENTS.values():
        internet.handle(host, "support.model_apis:task", key=KEY)
    return internet


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home as people have it."""
    home = tmp_path / "home"
    for name, content in {
        ".gitconfig": "[user]\n\tname = Ada\n\temail = ada@example.org\n",
        ".ssh/id_ed25519": "private",
        "other/secret.txt": "private",
        **{settings: f"of {name}" for name, (settings, _, _) in AGENTS.items()},
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content)
    return home


@pytest.fixture
def project(home: Path) -> Path:
    """A project with a failing test, in git."""
    need_program("git")
    project = home / "project"
    project.mkdir()
    (project / "adding.py").write_text("def add(a, b):\n    return a - b\n")
    (project / "test_adding.py").write_text(
        "import unittest\nfrom adding import add\n\n\nclass Test(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n"
    )
    (project / "agent.py").write_bytes(AGENT.read_bytes())
    environ = {**os.environ, "HOME": str(home)}
    (project / "app").mkdir()
    for secrets in (".env", "app/.env"):
        (project / secrets).write_text("TOKEN=private\n")
    (project / ".gitignore").write_text(".env\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "First"]):
        subprocess.run(["git", *words], cwd=project, env=environ, check=True)
    return project


def run(recipe: Path, project: Path, name: str, api: Internet) -> dict[str, Any]:
    settings, key, host = AGENTS[name]
    wanted = json.dumps({"settings": settings, "key": key, "api": host})
    environ = {"HOME": str(project.parent), key: KEY, "GITHUB_TOKEN": "private"}
    done = api.stockade("run", "-p", str(recipe), "--", PYTHON, "agent.py", wanted, cwd=project, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_can_work_and_do_nothing_else(name: str, project: Path, home: Path, api: Internet) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    found = run(RECIPES / f"{name}.toml", project, name, api)
    assert (found["settings"], found["task"]) == (f"of {name}", "fix it")
    assert "stockade" in found["key"] and KEY not in json.dumps(found)
    assert found["tests"].startswith("0") and found["commit"] == "0" and found["author"] == "0 Ada"
    assert found["session"] == "done"
    attempts = found["attempts"]
    assert attempts.pop("plant a hook") == "done", "in the copy"
    assert attempts.pop("leave something in the home") == "done", "in a home that is gone at the end"
    assert set(attempts) == {
        "change its settings",
        "read a private key",
        "read the project's secrets",
        "read secrets deeper in the project",
        "read another project",
        "read a token in the environment",
        "reach another host",
        "reach another address",
        "reach a server of this machine",
        "reach the metadata address",
    }
    assert "done" not in attempts.values()
    host = AGENTS[name][2]
    assert api.asked() == {host} and {event["host"] for event in api.events("request")} == {host}
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    shown = subprocess.run([STOCKADE, "diff"], cwd=project, capture_output=True, timeout=60, check=False)
    assert b"private" not in shown.stdout
    kept = subprocess.run(
        [STOCKADE, "commit"], cwd=project, capture_output=True, text=True, timeout=60, check=False
    )
    assert kept.returncode == 1 and "held back: .git/hooks" in kept.stderr, kept.stderr
    assert "a + b" in (project / "adding.py").read_text() and not (project / ".git/hooks/pre-commit").exists()
    log = subprocess.run(
        ["git", "log", "-1", "--format=%s"],
        cwd=project,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert log.stdout == "Adding adds\n"


def test_without_the_network_all_but_the_api_works(
    project: Path, home: Path, api: Internet, tmp_path: Path
) -> None:
    recipe = tmp_path / "offline.toml"
    lines = (RECIPES / "claude-code.toml").read_text().splitlines()
    recipe.write_text("\n".join(line for line in lines if not line.startswith("net = ")))
    found = run(recipe, project, "claude-code", api)
    assert found["task"].startswith("no answer") and found["tests"].startswith("0")


def test_the_clause_of_the_recipes_is_what_hides_the_secrets_of_the_project(
    project: Path, home: Path, api: Internet, tmp_path: Path
) -> None:
    recipe = tmp_path / "open.toml"
    lines = (RECIPES / "claude-code.toml").read_text().splitlines()
    recipe.write_text("\n".join(line for line in lines if not line.startswith("deny = ")))
    attempts = run(recipe, project, "claude-code", api)["attempts"]
    assert attempts["read the project's secrets"] == attempts["read secrets deeper in the project"] == "done"


def test_every_recipe_is_described_and_every_description_is_a_recipe() -> None:
    described = set(re.findall(r"/policies/([a-z-]+)\.toml\)", DOCUMENT.read_text()))
    assert described == {path.stem for path in RECIPES.glob("*.toml")} == set(AGENTS)
