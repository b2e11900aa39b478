"""A command runs with the install it belongs to, wherever a version manager has put it, and sees no more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox
from stockade.linux.user import Caller
from stockade.resolve.resolution import resolve
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain import installs, shims
from support import installs as made
from support.cli import stockade_command
from support.installs import LINKS_INSIDE, PATH_INSIDE, SYSTEM_PATH, install, program
from support.means import applies

REAL_PATH = os.environ.get("PATH", "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    (home / "notes.txt").write_text("private\n")
    monkeypatch.setenv("HOME", str(home))
    # As in the `stockade` command: which Python runs the tests does not count.
    monkeypatch.setattr(Caller, "from_python", False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    for variable, *_ in installs.MANAGERS:
        monkeypatch.delenv(variable, raising=False)
    for name in ("PYENV_VERSION", "RUSTUP_TOOLCHAIN"):
        monkeypatch.delenv(name, raising=False)
    return home


def search(*directories: Path) -> None:
    os.environ["PATH"] = ":".join([*map(str, directories), SYSTEM_PATH])


def resolved(home: Path, command: str, **clauses: object) -> ResolvedPolicy:
    policy = Policy(workspace=str(home / "project"), **clauses)  # type: ignore[arg-type]
    return resolve(policy, Caller.current(), os.environ["STOCKADE_HOME"], command=command)


def shown(home: Path, command: str, **clauses: object) -> set[str]:
    with resolved(home, command, **clauses) as found:
        return {os.path.relpath(grant.path, home) for grant in found.grants if grant.clause[:4] != "prof"}


def ran(home: Path, command: str, **clauses: object) -> str:
    """What the command says of itself, run in the project."""
    policy = Policy(workspace=str(home / "project"), **clauses)  # type: ignore[arg-type]
    result = stockade.run([command], policy, on_exit="discard")
    assert result.ok, (result.reason, result.hint, result.stderr)
    return result.text.strip()


def _pyenv(home: Path) -> str:
    search(made.pyenv(home / ".pyenv", "3.9.1", "3.11.7", chosen="3.11.7"))
    return "python3"


def _pyenv_moved(home: Path) -> str:
    search(made.pyenv(home / "elsewhere", "3.11.7", chosen="3.11.7"))
    return "pip"


def _pyenv_virtualenv(home: Path) -> str:
    root = home / ".pyenv"
    shims_directory = made.pyenv(root, "3.11.7", chosen="mine")
    made.venv(root / "versions/3.11.7/envs/mine", root / "versions/3.11.7")
    (root / "versions/mine").symlink_to("3.11.7/envs/mine")
    search(shims_directory)
    return "python3"


def _rbenv(home: Path) -> str:
    install(home / ".rbenv/versions/3.3.0", "ruby")
    shim = made.SHIM.format(variable="RBENV_ROOT", root=home / ".rbenv")
    program(home / ".rbenv/shims/ruby", shim)
    (home / ".rbenv/version").write_text("3.3.0\n")
    search(home / ".rbenv/shims")
    return "ruby"


def _venv(home: Path) -> str:
    search(made.venv(home / "venvs/a", made.python(home / ".pyenv/versions/3.11.7")) / "bin")
    return "python3"


def _venv_of_copies(home: Path) -> str:
    base = made.python(home / "builds/3.11")
    search(made.venv(home / "venvs/a", base, copies=True) / "bin")
    return "python3"


def _venv_in_the_workspace(home: Path) -> str:
    made.venv(home / "project/.venv", made.python(home / ".pyenv/versions/3.11.7"))
    return ".venv/bin/python3"


def _activated_venv_in_the_workspace(home: Path) -> str:
    search(made.venv(home / "project/.venv", made.python(home / ".pyenv/versions/3.11.7")) / "bin")
    return "python3"


def _venv_of_a_python_in_the_path(home: Path) -> str:
    base = made.python(home / "builds/3.11")
    made.venv(home / "project/.venv", base)
    search(base / "bin")
    return ".venv/bin/python3"


def _conda(home: Path) -> str:
    prefix = install(home / "miniconda3/envs/data", "python3", "conda")
    (prefix / "conda-meta").mkdir()
    search(prefix / "bin")
    return "python3"


def _uv(home: Path) -> str:
    """uv's environments name their Python by a link that stands for the latest of its kind."""
    pythons = home / ".local/share/uv/python"
    made.python(pythons / "cpython-3.11.7-linux")
    (pythons / "cpython-3.11-linux").symlink_to("cpython-3.11.7-linux")
    made.venv(home / "project/.venv", pythons / "cpython-3.11-linux")
    return ".venv/bin/python3"


def _uv_tool(home: Path) -> str:
    base = made.python(home / ".local/share/uv/python/cpython-3.11.7-linux")
    tool = made.venv(home / ".local/share/uv/tools/black", base)
    program(tool / "bin/black", f"#!{tool}/bin/python3\n")
    (home / ".local/bin").mkdir()
    (home / ".local/bin/black").symlink_to(tool / "bin/black")
    search(home / ".local/bin")
    return "black"


def _user_site(home: Path) -> str:
    packages = home / ".local/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "installed").write_text("user\n")
    program(
        home / ".local/bin/tool", f"#!/usr/bin/python3\nprint('ran', open('{packages}/installed').read())\n"
    )
    search(home / ".local/bin")
    return "tool"


def _nvm(home: Path) -> str:
    prefix = install(home / ".nvm/versions/node/v20.1.0", "node")
    (prefix / "lib/node_modules/npm/bin").mkdir(parents=True)
    program(prefix / "lib/node_modules/npm/bin/npm-cli.js", "#!/usr/bin/env node\n")
    (prefix / "bin/npm").symlink_to("../lib/node_modules/npm/bin/npm-cli.js")
    search(prefix / "bin")
    return "npm"


def _fnm(home: Path) -> str:
    prefix = install(home / ".local/share/fnm/node-versions/v20.1.0/installation", "node")
    (prefix / "lib/node_modules/npm").mkdir(parents=True)
    (home / "run").mkdir()
    (home / "run/1_2").symlink_to(prefix)
    search(home / "run/1_2/bin")
    return "node"


def _npm_global(home: Path) -> str:
    package = home / ".npm-global/lib/node_modules/tool"
    program(package / "cli.js", f"#!/bin/sh\necho ran $0 in $(cat {package}/../other/installed)\n")
    (package / "../other").mkdir()
    (package / "../other/installed").write_text("x\n")
    (home / ".npm-global/bin").mkdir()
    (home / ".npm-global/bin/tool").symlink_to("../lib/node_modules/tool/cli.js")
    search(home / ".npm-global/bin")
    return "tool"


def _rustup(home: Path) -> str:
    search(made.rustup(home, "nightly-x", "stable-x", chosen="stable-x"))
    return "cargo"


def _go(home: Path) -> str:
    prefix = install(home / "sdk/go1.22", "go")
    (prefix / "VERSION").write_text("go1.22\n")
    (prefix / "pkg/tool").mkdir(parents=True)
    search(prefix / "bin")
    return "go"


def _go_tool(home: Path) -> str:
    program(home / "go/bin/gopls")
    search(home / "go/bin")
    return "gopls"


def _sdkman(home: Path) -> str:
    prefix = install(home / ".sdkman/candidates/maven/3.9.6", "mvn")
    (prefix.parent / "current").symlink_to("3.9.6")
    search(prefix.parent / "current/bin")
    return "mvn"


def _java(home: Path) -> str:
    prefix = install(home / "jdk-21", "java")
    (prefix / "release").write_text("JAVA_VERSION=21\n")
    search(prefix / "bin")
    return "java"


def _other_name(home: Path) -> str:
    prefix = made.python(home / ".pyenv/versions/3.11.7")
    (home / "bin").mkdir()
    (home / "bin/py").symlink_to(prefix / "bin/python3")
    search(home / "bin")
    return "py"


def _typed_shim(home: Path) -> str:
    return f"{made.pyenv(home / '.pyenv', '3.11.7', chosen='3.11.7')}/python3"


def _script_in_the_workspace(home: Path) -> str:
    search(made.pyenv(home / ".pyenv", "3.11.7", chosen="3.11.7"))
    program(home / "project/manage.py", "#!/usr/bin/env python3\n")
    return "./manage.py"


BASE = ".pyenv/versions/3.11.7"
#: Where the command comes from, and what is shown of the home for it.
CASES: dict[str, tuple[Callable[[Path], str], set[str]]] = {
    "pyenv": (_pyenv, {BASE}),
    "pyenv elsewhere": (_pyenv_moved, {"elsewhere/versions/3.11.7"}),
    "pyenv-virtualenv": (_pyenv_virtualenv, {BASE, f"{BASE}/envs/mine"}),
    "rbenv": (_rbenv, {".rbenv/versions/3.3.0"}),
    "venv": (_venv, {"venvs/a", BASE}),
    "venv of copies": (_venv_of_copies, {"venvs/a", "builds/3.11"}),
    "venv in the workspace": (_venv_in_the_workspace, {BASE}),
    "activated venv in the workspace": (_activated_venv_in_the_workspace, {BASE}),
    "venv of a Python in the PATH": (_venv_of_a_python_in_the_path, {"builds/3.11"}),
    "conda": (_conda, {"miniconda3/envs/data"}),
    "uv": (_uv, {".local/share/uv/python/cpython-3.11.7-linux"}),
    "uv tool": (_uv_tool, {".local/share/uv/python/cpython-3.11.7-linux", ".local/share/uv/tools/black"}),
    "user site": (_user_site, {".local/bin/tool", ".local/lib/python3.11/site-packages"}),
    "nvm": (_nvm, {".nvm/versions/node/v20.1.0"}),
    "fnm": (_fnm, {".local/share/fnm/node-versions/v20.1.0/installation"}),
    "npm global": (_npm_global, {".npm-global/lib/node_modules"}),
    "rustup": (_rustup, {".rustup/toolchains/stable-x"}),
    "go": (_go, {"sdk/go1.22"}),
    "go install": (_go_tool, {"go/bin/gopls"}),
    "sdkman": (_sdkman, {".sdkman/candidates/maven/3.9.6"}),
    "java": (_java, {"jdk-21"}),
    "another name": (_other_name, {BASE}),
    "a shim by its path": (_typed_shim, {BASE}),
    "a script in the workspace": (_script_in_the_workspace, {BASE}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_command_runs_with_its_install_and_nothing_else_of_the_home(home: Path, name: str) -> None:
    prepare, expected = CASES[name]
    command = prepare(home)
    assert shown(home, command) == expected
    assert ran(home, command).startswith("ran ")
    listing = stockade.run(
        ["ls", "-A", str(home)], Policy(workspace=str(home / "project"), toolchain=[command])
    )
    assert "notes.txt" not in listing.text


def test_siblings_of_the_command_are_found_by_name(home: Path) -> None:
    prefix = install(home / ".nvm/versions/node/v20.1.0", "node", "npx")
    (prefix / "lib/node_modules/npm").mkdir(parents=True)
    program(prefix / "bin/outer", "#!/bin/sh\nexec npx\n")
    search(prefix / "bin")
    assert ran(home, "outer") == f"ran {prefix}/bin/npx in v20.1.0"


@pytest.mark.parametrize(
    ("written", "version"),
    [
        ("3.9.1", "3.9.1"),
        ("3.9", "3.9.12"),
        ("# mine\n3.10.0  # and why\n", "3.10.0"),
        ("nonsense:3.9.1", "3.9.1"),
    ],
)
def test_the_version_is_the_one_that_the_project_asks_for(home: Path, written: str, version: str) -> None:
    search(made.pyenv(home / ".pyenv", "3.9.1", "3.9.12", "3.10.0", chosen="3.10.0"))
    (home / "project/.python-version").write_text(written)
    assert shown(home, "python3") == {f".pyenv/versions/{version}"}


def test_the_users_variable_comes_before_the_project(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(made.pyenv(home / ".pyenv", "3.9.1", "3.10.0", chosen="3.10.0"))
    (home / "project/.python-version").write_text("3.10.0\n")
    monkeypatch.setenv("PYENV_VERSION", "3.9.1")
    assert shown(home, "python3") == {".pyenv/versions/3.9.1"}


def test_the_systems_version_needs_nothing(home: Path) -> None:
    search(made.pyenv(home / ".pyenv", "3.9.1", chosen="system"))
    assert shown(home, "python3") == set()


def test_a_version_that_is_not_installed_is_refused_by_name(home: Path) -> None:
    search(made.pyenv(home / ".pyenv", "3.9.1", chosen="3.9.1"))
    (home / "project/.python-version").write_text("2.7\n")
    with pytest.raises(PolicyError, match="pyenv has no python3 in the chosen version: 2") as refused:
        shown(home, "python3")
    assert "--no-toolchain" in refused.value.hint
    assert f"{home}/project/.python-version" in refused.value.message


def test_a_project_may_choose_the_rust_toolchain_by_name(home: Path) -> None:
    search(made.rustup(home, "nightly-x86_64", "stable-x86_64", chosen="stable-x86_64"))
    (home / "project/rust-toolchain.toml").write_text('[toolchain]\nchannel = "nightly"\n')
    assert shown(home, "cargo") == {".rustup/toolchains/nightly-x86_64"}


def test_trees_for_the_whole_machine_are_shown_as_a_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /opt and /nix/store, which a test cannot fill."""
    store, opt = tmp_path / "nix/store", tmp_path / "opt"
    monkeypatch.setattr(installs, "SHARED", ((str(opt), 1), (str(store), 0)))
    monkeypatch.setattr(installs, "WHOLE", (str(store),))
    install(opt / "vendor/app", "app")
    install(store / "abc-tool", "tool")
    (home / ".nix-profile").symlink_to(store / "env")
    (store / "env/bin").mkdir(parents=True)
    (store / "env/bin/tool").symlink_to(store / "abc-tool/bin/tool")
    search(opt / "vendor/app/bin", home / ".nix-profile/bin")
    assert ran(home, "app") == f"ran {opt}/vendor/app/bin/app in app"
    assert ran(home, "tool") == f"ran {store}/env/bin/tool in abc-tool"
    assert shown(home, "app") == {"../opt/vendor"} and shown(home, "tool") == {"../nix/store"}


def test_a_command_of_the_system_costs_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is opened and no directory looked through: one call for each directory of the PATH."""
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            calls.append(f"{name} {arguments[0]}")
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    search(home / "a", home / "b")
    for name in ("access", "stat", "lstat", "readlink", "listdir", "scandir"):
        counted(name)
    monkeypatch.setattr(shims, "first_bytes", lambda *_: pytest.fail("a file was read"))
    with resolved(home, "true") as found:
        assert found.links == LINKS_INSIDE and found.environ["PATH"] == PATH_INSIDE
    looked = [call for call in calls if call.endswith("/true")]
    assert len(looked) <= len(SYSTEM_PATH.split(":")) + 4, looked


def test_it_can_be_turned_off(home: Path) -> None:
    command = _go_tool(home)
    assert shown(home, command, toolchain=False) == set()
    policy = Policy(workspace=str(home / "project"), toolchain=False)
    result = stockade.run([command], policy, advise=True)
    assert (result.outcome, result.exit_code) == ("setup-failed", 127)
    assert f"{home}/go/bin/gopls" in result.reason
    assert f"--read {home}/go/bin/gopls" in result.hint and "--no-toolchain" in result.hint
    again = Policy(workspace=str(home / "project"), toolchain=False, read=[f"{home}/go/bin/gopls"])
    assert stockade.run([f"{home}/go/bin/gopls"], again).ok


def test_a_policy_that_lists_programs_or_sets_a_path_is_left_alone(home: Path) -> None:
    command = _pyenv(home)
    assert shown(home, command, exec=["/usr/bin/*"]) == set()
    assert shown(home, command, env={"PATH": "/usr/bin"}) == set()
    assert shown(home, f"{home}/.pyenv/shims/python3", env={"PATH": "/usr/bin"}) == {BASE}


def test_a_living_sandbox_names_the_commands_it_will_run(home: Path) -> None:
    command = _pyenv(home)
    with Sandbox(Policy(workspace=str(home / "project"), toolchain=[command])) as box:
        assert box.run(["sh", "-c", command]).text.startswith("ran ")
    with pytest.raises(PolicyError, match='toolchain = "pythn": there is no such command in your PATH'):
        Sandbox(Policy(toolchain=["pythn"])).open()
    with pytest.raises(PolicyError) as refused:
        Policy(toolchain="python3")
    assert refused.value.hint == 'write toolchain = ["python3"]'


def test_the_plan_shows_what_is_shown_and_why(home: Path) -> None:
    _other_name(home)
    plan = json.loads(stockade_command("plan", "--json", "--", "py", cwd=home / "project").stdout)
    does = {op["does"]: op["clause"] for op in plan["operations"]}
    prefix = home / BASE
    assert does[f"show {prefix} read-only; sockets in it cannot be connected to"] == 'toolchain = "py"'
    assert does[f"link {home}/bin/py → {prefix}/bin/python3"] == "toolchain"


def test_the_command_line_turns_it_off_and_asks_for_more(home: Path) -> None:
    command = _pyenv(home)
    found = stockade_command("run", "--toolchain", command, "--", "sh", "-c", command, cwd=home / "project")
    assert found.stdout.startswith("ran ")
    search(install(home / "x", "only-here") / "bin")
    refused = stockade_command("run", "--no-toolchain", "--", "only-here", cwd=home / "project")
    assert refused.returncode == 127
    assert f"--read {home}/x/bin/only-here" in refused.stderr


def test_the_development_profile_searches_the_callers_path_as_far_as_it_is_shown(home: Path) -> None:
    shim = made.pyenv(home / ".pyenv", "3.11.7", chosen="3.11.7")
    cargo = made.rustup(home, "stable-x", chosen="stable-x")
    node = install(home / ".nvm/versions/node/v20.1.0", "node") / "bin"
    hidden = install(home / "hidden", "hidden") / "bin"
    search(shim, cargo, node, hidden)
    with resolved(home, "sh", profile="dev") as found:
        path = found.environ["PATH"].split(":")
    assert path == [f"{home}/{BASE}/bin", str(shim), str(cargo), str(node), *PATH_INSIDE.split(":")]
    policy = Policy(profile="dev", workspace=str(home / "project"))
    result = stockade.run(["sh", "-c", "python3 && pip && node && ! hidden"], policy)
    assert result.ok and result.text.count("ran ") == 3, result.stderr


def test_a_real_virtual_environment_works(home: Path) -> None:
    """Of the Python that runs this, which may lie in a home that is closed to others."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(home / "venvs/real")], check=True)
    search(home / "venvs/real/bin")
    script = "import sys, ssl, sqlite3, ctypes; print(sys.prefix, sys.base_prefix)"
    policy = Policy(workspace=str(home / "project"))
    found = stockade.run(["python3", "-c", script], policy)
    assert found.text.split() == [str(home / "venvs/real"), sys.base_prefix], found.stderr


@pytest.mark.parametrize("command", ["python3", "pip", "node", "npm", "cargo"])
def test_the_tools_of_this_machine_work_as_they_are_found(
    command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", REAL_PATH)
    monkeypatch.setattr(Caller, "from_python", False)
    applies(shutil.which(command) is not None, f"{command} is not installed for this user")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, cwd=workspace, check=True)
    result = stockade.run([command, "--version"], Policy(workspace=str(workspace)), timeout=60)
    assert result.text == found.stdout, (result.reason, result.stderr)
