"""Layers of policies: the more specific wins, lists say what they do, and nothing exceeds the ceiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stockade import Policy, PolicyError
from stockade.resolve.discovery import discover
from support.means import applies

LAYERS = """
[global]
read = ["/opt"]
limits = { wall = "5m", memory = "1G" }

[category.reviewers]
read = { extend = ["/usr/local/share"] }
protect = { extend = [".github"] }
env = { LEVEL = "category", KIND = "review" }

[agent.linter]
category = "reviewers"
limits = { wall = "30s" }
env = { LEVEL = "agent" }

[agent.hermit]
read = { replace = [] }

[agent.plain]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's own policies."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = tmp_path / "config" / "stockade"
    directory.mkdir(parents=True)
    return directory


class TestMistakes:
    def test_both_a_file_and_a_directory_are_too_many(self, config: Path) -> None:
        (config / "policies.toml").write_text("")
        (config / "policies").mkdir()
        assert "keep one" in stockade(config, "run", "--", "true").stderr


def stockade(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stockade", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=config)


class TestCeiling:
    """What a user decided for everything that is started from the command line."""

    CEILING = '[ceiling]\nread = ["/opt"]\nlimits = { wall = "5m" }\n[agent.a]\nlimits = { wall = "10s" }\n'

    @pytest.fixture(autouse=True)
    def written(self, config: Path) -> None:
        (config / "policies.toml").write_text(self.CEILING)

    def found(self, config: Path, **options: Any) -> Policy:
        environ = {"XDG_CONFIG_HOME": str(config.parent)}
        return discover(str(config), environ, str(config.parent / "home"), **options).policy

    def test_one_that_cannot_be_looked_at_is_no_absent_one(self, config: Path) -> None:
        applies(os.geteuid() != 0, "root looks at everything")
        config.chmod(0)
        try:
            with pytest.raises(PolicyError, match="cannot look at"):
                self.found(config)
        finally:
            config.chmod(0o700)

    def test_what_it_denies_is_hidden_also_in_what_no_clause_shows(self, config: Path) -> None:
        ceiling = f'[ceiling]\nworkspace = "{config}"\nprofile = "dev"\ndeny = ["/usr/share/zoneinfo"]'
        (config / "policies.toml").write_text(ceiling)
        done = stockade(config, "run", "-q", "--", "ls", "/usr/share/zoneinfo")
        assert done.returncode == 2 and "No such file" in done.stderr


class TestCommand:
    def test_run_uses_the_agents_policy(self, config: Path) -> None:
        (config / "policies.toml").write_text('[agent.a]\nenv = { WHO = "a" }')
        done = stockade(config, "run", "-q", "--agent", "a", "--", "printenv", "WHO")
        assert (done.returncode, done.stdout) == (0, "a\n")

    def test_resolve_prints_where_each_field_came_from(self, config: Path) -> None:
        (config / "policies.toml").write_text(LAYERS)
        text = stockade(config, "policy", "resolve", "--agent", "linter").stdout
        rows = [line.split() for line in text.splitlines()]
        assert ["limits.wall", '"30s"', "agent", "linter"] in rows
        assert "no ceiling" in text
        facts = json.loads(stockade(config, "policy", "resolve", "--agent", "linter", "--json").stdout)
        assert facts["origins"]["read"] == ["global", "category reviewers"]
        assert facts["policy"]["limits"]["wall"] == 30.0

    def test_resolve_needs_somebody(self, config: Path) -> None:
        (config / "policies.toml").write_text(LAYERS)
        done = stockade(config, "policy", "resolve")
        assert done.returncode == 125 and "--agent NAME" in done.stderr

    def test_diff_says_what_only_one_allows(self, config: Path) -> None:
        (config / "a.toml").write_text('read = ["/opt"]\nnet = "open"')
        (config / "b.toml").write_text('limits = { wall = "5s" }')
        done = stockade(config, "policy", "diff", "a.toml", "b.toml")
        assert done.returncode == 1
        assert "only a.toml: read /opt" in done.stdout and "the host's network" in done.stdout
        assert 'limits.wall: none where "5s" is allowed' in done.stdout
        assert stockade(config, "policy", "diff", "b.toml", "b.toml").returncode == 0
        facts = json.loads(stockade(config, "policy", "diff", "a.toml", "b.toml", "--json").stdout)
        assert facts["only_b"] == [] and len(facts["only_a"]) == 3

    def test_diff_knows_what_is_hidden_in_the_directory_one_is_in(self, config: Path) -> None:
        (config / "a.toml").write_text('deny = [".env", "**/*.pem"]')
        (config / "b.toml").write_text('deny = [".env.local"]')
        done = stockade(config, "policy", "diff", "a.toml", "b.toml")
        assert done.returncode == 1 and done.stdout.splitlines() == [
            f"only a.toml: change a copy of {config}/.env.local",
            f"only b.toml: change a copy of {config}/.env",
            f'only b.toml: without deny = "{config}/**/*.pem"',
        ]
