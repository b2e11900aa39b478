"""`stockade init`: small real projects whose tests run under the policy that it writes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Policy, cli
from stockade.cli.ui import project_kinds
from support.means import need, need_program
from support.screen import STOCKADE

SYSTEM = "/usr/local/bin:/usr/bin:/bin"
Make = Callable[[dict[str, str]], Path]


@pytest.fixture
def make(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A project with these files, and only the system's programs to be found."""
    monkeypatch.setenv("PATH", SYSTEM)
    monkeypatch.chdir(workspace)

    def files(contents: dict[str, str]) -> Path:
        for name, content in contents.items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(content)
        return workspace

    return files


def init(*words: str) -> tuple[int, str]:
    """The exit code and what was said."""
    done = subprocess.run([STOCKADE, "init", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def suggested(said: str) -> list[str]:
    """The command that is to be typed next."""
    (line,) = [line for line in said.splitlines() if line.startswith("stockade: next: stockade ")]
    return shlex.split(line.partition("next: stockade ")[2])


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STOCKADE, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )


PYTHON = {
    "adding.py": "def add(a, b):\n    return a + b\n",
    "tests/test_adding.py": "import unittest\nfrom adding import add\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "tests/__init__.py": "",
    "requirements.txt": "",
    ".env": "TOKEN=1\n",
}
NODE = {
    "package.json": '{"name": "adding", "version": "1.0.0", "scripts": {"test": "node test.js"}}',
    "test.js": "require('assert').strictEqual(1 + 2, 3); console.log('it adds')\n",
}
C = {
    "adding.c": "int main(void) { return 1 + 2 - 3; }\n",
    "Makefile": "check: adding\n\t./adding && echo it adds\nadding: adding.c\n\tcc -o adding adding.c\n",
}


class TestProjects:
    def test_python_with_unittest(self, make: Make) -> None:
        need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
        here = make(PYTHON)
        code, said = init()
        assert code == 0 and "Python, pip" in said
        policy = Policy.from_toml((here / "stockade.toml").read_text(), base=str(here))
        deep = ("**/.env?", "**/.env.*local?", "**/.env.production?", "**/.env.staging?")
        assert policy.deny == ("./.env", *deep)
        done = run(suggested(said))
        assert done.returncode == 0 and "OK" in done.stderr, done.stderr
        assert "changed path" not in done.stderr, "the tests of an unchanged project leave nothing"
        hidden = run(["run", "-q", "--", "cat", ".env"])
        assert hidden.returncode == 1

    def test_python_with_pytest_in_an_environment_of_its_own(self, make: Make) -> None:
        """The interpreter that these tests run under stands for one that the project has installed."""
        here = make({**PYTHON, "pytest.ini": "[pytest]\n"})
        made = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", ".venv"]
        subprocess.run(made, check=True, timeout=60)
        packages = next((here / ".venv/lib").glob("python*")) / "site-packages"
        source = Path(pytest.__file__ or "").parents[1]
        for name in ("pytest", "_pytest", "py.py", "pluggy*", "packaging", "iniconfig", "pygments"):
            subprocess.run(["cp", "-r", *map(str, source.glob(name)), str(packages)], check=True)
        code, said = init()
        assert code == 0 and suggested(said)[3] == ".venv/bin/python"
        if "stockade trust" in said:  # where the interpreter behind it is not the system's
            assert run(["trust", "-q"]).returncode == 0
        done = run(suggested(said))
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr

    def test_node_with_npm(self, make: Make) -> None:
        need_program("npm")
        need(Path("/usr/bin/npm").exists() or Path("/usr/local/bin/npm").exists(), "npm is not the system's")
        make(NODE)
        code, said = init()
        assert code == 0 and suggested(said)[-2:] == ["npm", "test"]
        done = run(suggested(said))
        assert done.returncode == 0 and "it adds" in done.stdout, done.stdout + done.stderr

    def test_c_with_make(self, make: Make) -> None:
        need_program("gcc")
        make(C)
        code, said = init()
        assert code == 0 and suggested(said)[-2:] == ["make", "check"]
        done = run(suggested(said))
        assert done.returncode == 0 and "it adds" in done.stdout, done.stdout + done.stderr
        assert not Path("adding").exists()


KNOWN: list[tuple[dict[str, str], str, str]] = [
    ({"Cargo.toml": ""}, "cargo", "cargo test --offline"),
    ({"go.mod": ""}, "go", "go test ./..."),
    ({"package.json": '{"scripts": {"test": "x"}}', "pnpm-lock.yaml": ""}, "pnpm", "pnpm test"),
    ({"package.json": '{"scripts": {"test": "x"}}', "yarn.lock": ""}, "yarn", "yarn test"),
    ({"package.json": '{"scripts": {"test": "x"}}', "bun.lock": ""}, "bun", "bun run test"),
    ({"package.json": '{"scripts": {"test": "echo \\"Error: no test specified\\""}}'}, "npm", ""),
    ({"package.json": "[]"}, "npm", ""),
    ({"package.json": '{"scripts": {"test": ["x"]}}'}, "npm", ""),
    ({"package.json": "{"}, "npm", ""),
    ({"pyproject.toml": "[tool.pytest]", "uv.lock": ""}, "uv", "python3 -m pytest -p no:cacheprovider"),
    ({"pyproject.toml": "", "poetry.lock": ""}, "poetry", ""),
    ({"test_a.py": ""}, "pip", "python3 -m unittest discover"),
    ({"deno.json": ""}, "deno", "deno test --cached-only"),
    ({"pom.xml": "", "mvnw": ""}, "Maven", "./mvnw --offline test"),
    ({"build.gradle.kts": ""}, "Gradle", "gradle --offline test"),
    ({"Gemfile": "", "spec/a": ""}, "bundler", "bundle exec rspec"),
    ({"meson.build": ""}, "Meson", "sh -c 'meson setup build && meson test -C build'"),
    ({"Makefile": "all:\n"}, "make", ""),
    ({"Makefile": "test:\n", "a.c": ""}, "make", "make test"),
    ({"Makefile": "test:\n", "Cargo.toml": ""}, "cargo", "cargo test --offline"),
    ({"Makefile": "test:\n", "pyproject.toml": ""}, "make", "make test"),
]


def test_a_project_is_known_by_its_files(tmp_path: Path) -> None:
    for number, (files, manager, command) in enumerate(KNOWN):
        here = tmp_path / str(number)
        for name, content in files.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text(content)
        first = project_kinds.kinds(str(here))[0]
        assert (first.manager, shlex.join(first.command)) == (manager, command)
        assert cli.main(["init", "--print", str(here)]) == 0


def test_of_an_unknown_project_the_policy_is_written_all_the_same(make: Make) -> None:
    make({"poem.txt": ""})
    code, said = init()
    assert code == 0 and suggested(said) == ["run", "--discard", "--", "COMMAND"]
    assert run(["run", "-q", "--", "true"]).returncode == 0


def test_what_is_there_is_not_overwritten(make: Make) -> None:
    here = make({"stockade.toml": "# mine\n"})
    code, said = init()
    assert code == 125 and "has a policy already" in said and "--force" in said
    assert (here / "stockade.toml").read_text() == "# mine\n"
    assert init("--print")[0] == 0 and (here / "stockade.toml").read_text() == "# mine\n"
    assert init("--force")[0] == 0
    assert tomllib.loads((here / "stockade.toml").read_text())["workspace"] == {"path": "."}


@pytest.mark.parametrize("content", ["this is not toml [", "[tool.stockade]\nprofile = 'strict'\n"])
def test_a_policy_elsewhere_is_not_doubled(make: Make, content: str) -> None:
    name = "stockade.toml" if "tool" not in content else "pyproject.toml"
    here = make({name: content})
    assert init()[0] == 125
    assert (here / name).read_text() == content


def test_a_link_is_not_written_through(make: Make, tmp_path: Path) -> None:
    here = make({})
    (tmp_path / "target").write_text("mine")
    (here / "stockade.toml").symlink_to(tmp_path / "target")
    assert init("--force")[0] == 125
    assert (tmp_path / "target").read_text() == "mine"


def test_what_a_link_of_the_projects_leads_to_is_no_grant(make: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    here = make({"requirements.txt": ""})
    (here / ".venv/bin").mkdir(parents=True)
    (here / ".venv/bin/python").symlink_to(secret / "key")
    assert init()[0] == 0
    assert "secret" not in (here / "stockade.toml").read_text()


def test_a_pipe_in_place_of_a_file_does_not_hold_it(make: Make) -> None:
    here = make({})
    os.mkfifo(here / "package.json")
    assert init()[0] == 0


def test_a_directory_can_be_named_and_must_be_one(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    here = make({"sub/Cargo.toml": "", "file": ""})
    assert init("sub")[0] == 0 and (here / "sub/stockade.toml").exists()
    assert cli.main(["init", "file"]) == 125
    assert "is not a directory" in capsys.readouterr().err


def test_tools_that_are_not_the_systems_are_shown_and_have_to_be_trusted(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make({"Cargo.toml": ""})
    home = tmp_path / "home"
    for name in ("cargo", "rustc"):
        tool = home / ".cargo/bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho {name} $*\n")
        tool.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home}/.cargo/bin:{SYSTEM}")
    code, said = init()
    assert code == 0
    written = tomllib.loads(Path("stockade.toml").read_text())
    assert written["read"] == ["~/.cargo/bin", "~/.cargo/registry?", "~/.rustup?"]
    refused = run(suggested(said))
    assert refused.returncode == 125 and "stockade trust" in refused.stderr
    assert run(["trust", "-q"]).returncode == 0
    done = run(suggested(said))
    assert (done.returncode, done.stdout) == (0, "cargo test --offline\n"), done.stderr


def test_what_is_no_file_is_not_replaced_or_waited_for(make: Make) -> None:
    path = make(PYTHON) / "stockade.toml"
    os.mkfifo(path)
    code, said = init("--force")
    assert code == 125 and "stockade.toml" in said and path.is_fifo()


def test_a_full_disk_leaves_no_half_of_a_policy(make: Make) -> None:
    path = make(PYTHON) / "stockade.toml"
    limited = ["bash", "-c", 'ulimit -f 0; "$@" 2>&1 | cat', "limited", STOCKADE, "init"]
    said = subprocess.run(limited, capture_output=True, text=True, check=False).stdout
    assert f"cannot write {path}: " in said and not path.exists()
