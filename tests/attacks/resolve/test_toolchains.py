"""What a workspace does to have more of the home shown than it is given, through the installs of its user.

The user runs `python3`, or a script of the project, and what that leads to is
shown. Links, configuration and first lines in the project are a stranger's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError
from stockade.linux.user import Caller
from stockade.resolve.resolution import resolve
from stockade.resolve.toolchain import installs
from stockade.resolve.toolchain import needs as toolchains
from stockade.resolve.toolchain import search as lookup
from support import installs as made
from support.installs import SYSTEM_PATH, program

SECRET = "a secret of the home"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an install, secrets, a project, and another project that is none of the first one's."""
    home = tmp_path / "home"
    shims = made.pyenv(home / ".pyenv", "3.11.7", chosen="3.11.7")
    for name in (".ssh/agent", "private/tool", "bin/own"):
        program(home / name, f"#!/bin/sh\n# {SECRET}\n")
    made.venv(made.python(home / "other/python").parent / "venv", home / "other/python")
    (home / "other/secret.txt").write_text(SECRET)
    (home / "project").mkdir()
    monkeypatch.setenv("HOME", str(home))
    # As in the `stockade` command: which Python runs the tests does not count.
    monkeypatch.setattr(Caller, "from_python", False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("PATH", f"{shims}:{home}/bin:{SYSTEM_PATH}")
    for name in ("PYENV_VERSION", "PYENV_ROOT", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN"):
        monkeypatch.delenv(name, raising=False)
    return home


def shown(home: Path, command: str, **clauses: object) -> set[str]:
    """What is granted of the home besides the project, as names in it."""
    policy = Policy(workspace=str(home / "project"), **clauses)  # type: ignore[arg-type]
    with resolve(policy, Caller.current(), os.environ["STOCKADE_HOME"], command=command) as found:
        paths = [grant.path for grant in found.grants if grant.path.startswith(str(home))]
    return {os.path.relpath(path, home) for path in paths}


def link(place: str, target: str) -> Callable[[Path], None]:
    def plant(home: Path) -> None:
        (home / "project" / place).parent.mkdir(parents=True, exist_ok=True)
        (home / "project" / place).symlink_to(target.format(home=home))

    return plant


def config(text: str, *, fifo: bool = False) -> Callable[[Path], None]:
    """A virtual environment whose Python is a file of its own and whose base is elsewhere."""

    def plant(home: Path) -> None:
        program(home / "project/.venv/bin/python3")
        if fifo:
            os.mkfifo(home / "project/.venv/pyvenv.cfg")
        else:
            (home / "project/.venv/pyvenv.cfg").write_text(text.format(home=home))

    return plant


def script(text: str) -> Callable[[Path], None]:
    def plant(home: Path) -> None:
        program(home / "project/script", text.format(home=home))

    return plant


def written(name: str, text: str) -> Callable[[Path], None]:
    def plant(home: Path) -> None:
        (home / "project" / name).write_text(text.format(home=home))

    return plant


def fake_shim(home: Path) -> None:
    root = home / "project/tools"
    program(root / "shims/python3", made.SHIM.format(variable="PYENV_ROOT", root=root))
    (root / "version").write_text("1\n")
    (root / "versions").mkdir()
    (root / "versions/1").symlink_to(home / "private")
    (home / "private/bin").symlink_to(".")
    program(home / "private/python3", f"#!/bin/sh\n# {SECRET}\n")


VENV = ".venv/bin/python3"
#: What is planted in the project, and what the user types.
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to a secret": (link(VENV, "{home}/.ssh/agent"), VENV),
    "a link to a program of the home": (link(VENV, "{home}/private/tool"), VENV),
    "a link to another project's environment": (link(VENV, "{home}/other/venv/bin/python3"), VENV),
    "a link out of an install": (link(VENV, "{home}/.pyenv/versions/3.11.7/../../../private/tool"), VENV),
    "a link to a directory": (link(".venv", "{home}/private"), ".venv/tool"),
    "a link to the home": (link("up", "{home}"), "up/private/tool"),
    "a base in a place of secrets": (config("home = {home}/.ssh\n"), VENV),
    "a base in the home": (config("home = {home}/bin\n"), VENV),
    "a base in another project": (config("home = {home}/other/python/bin\n"), VENV),
    "a base that waits": (config("", fifo=True), VENV),
    "an interpreter": (script("#!{home}/private/tool\n"), "./script"),
    "a base that is no path": (config("home = {home}/bin\0b/bin\n"), VENV),
    "an interpreter that is no path": (script("#!{home}/private\0b/tool\n"), "./script"),
    "an interpreter that is no name": (script("#!/usr/bin/env private\0b\n"), "./script"),
    "an interpreter by name": (script("#!/usr/bin/env own\n"), "./script"),
    "an interpreter by options": (script("#!/usr/bin/env -S A=1 own x\n"), "./script"),
    "a shim of its own": (fake_shim, "tools/shims/python3"),
    "a name in the PATH": (link("node_modules/.bin/python3", "{home}/private/tool"), "python3"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_workspace_cannot_have_anything_of_the_home_shown(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, command = ATTACKS[name]
    plant(home)
    monkeypatch.setenv("PATH", f"node_modules/.bin:{os.environ['PATH']}")
    monkeypatch.chdir(home / "project")
    assert shown(home, command) == set()


@pytest.mark.parametrize("name", [name for name in ATTACKS if "waits" not in name and "is no" not in name])
def test_without_the_judgement_each_of_these_attacks_gets_through(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, command = ATTACKS[name]
    plant(home)
    monkeypatch.setenv("PATH", f"{home}/project/node_modules/.bin:{os.environ['PATH']}")
    search = lookup.ProgramSearch
    monkeypatch.setattr(search, "_is_strange", lambda self, path: False)
    monkeypatch.setattr(search, "_is_fit", lambda self, path: True)
    monkeypatch.setattr(
        installs, "is_install", lambda prefix: os.path.basename(prefix) in ("python", "venv", ".ssh", "home")
    )
    assert shown(home, command) != set()


@pytest.mark.parametrize("command", ["python3", VENV])
def test_inside_nothing_of_the_home_can_be_read(home: Path, command: str) -> None:
    """The whole way, with a link of the project as the command: what is typed is not what is shown."""
    link(VENV, "{home}/.pyenv/versions/3.11.7/bin/python3")(home)
    program(
        home / ".pyenv/versions/3.11.7/bin/python3.11",
        f"#!/bin/sh\nls -A {home} {home}/.pyenv; cat {home}/*/*\n",
    )
    result = stockade.run([command], Policy(workspace=str(home / "project")), on_exit="discard")
    assert set(result.text.split()) - {f"{home}:", f"{home}/.pyenv:"} == {".pyenv", "project", "versions"}
    assert SECRET.encode() not in result.stdout


@pytest.mark.parametrize(
    "version", ["../../private", "/etc", "..", ".", "3.11.7/../..", "3.11.7/../../../private"]
)
def test_a_project_chooses_among_the_installed_versions_and_nothing_else(home: Path, version: str) -> None:
    written(".python-version", version + "\n")(home)
    assert shown(home, "python3") == {".pyenv/versions/3.11.7"}


def test_a_toolchain_by_path_in_a_project_is_not_looked_at(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = made.rustup(home, "stable-x", chosen="stable-x")
    program(home / "private/bin/cargo")
    written("rust-toolchain.toml", '[toolchain]\npath = "{home}/private"\n')(home)
    monkeypatch.setenv("PATH", f"{proxies}:{SYSTEM_PATH}")
    assert shown(home, "cargo") == {".rustup/toolchains/stable-x"}
    written("rust-toolchain", "../../private\n")(home)
    with pytest.raises(PolicyError, match="rustup has no cargo"):
        shown(home, "cargo")


def test_the_home_is_never_the_prefix(home: Path) -> None:
    made.venv(home / "v", home / ".pyenv/versions/3.11.7")
    (home / "pyvenv.cfg").write_text(f"home = {home}/.ssh\n")
    assert shown(home, "own") == {"bin/own"}


@pytest.mark.parametrize("name", [".ssh", ".aws", ".gnupg", ".bash_history"])
def test_a_prefix_that_looks_like_a_home_is_not_shown(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made.python(home / "somebody")
    (prefix / name).mkdir()
    monkeypatch.setenv("PATH", f"{prefix}/bin:{SYSTEM_PATH}")
    assert shown(home, "pip") == {"somebody/bin/pip"}


def test_a_prefix_with_the_state_or_the_policy_in_it_is_not_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made.python(home / "all")
    monkeypatch.setenv("PATH", f"{prefix}/bin:{SYSTEM_PATH}")
    for variable, place in (("STOCKADE_HOME", "state"), ("XDG_CONFIG_HOME", "config")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(prefix / place))
            assert shown(home, "pip") == {"all/bin/pip"}


def test_a_prefix_around_the_workspace_is_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the project would be shown twice, and everything beside it."""
    prefix = made.python(home / "mono")
    (prefix / "app").mkdir()
    monkeypatch.setenv("PATH", f"{prefix}/bin:{SYSTEM_PATH}")
    policy = Policy(workspace=str(prefix / "app"))
    with resolve(policy, Caller.current(), os.environ["STOCKADE_HOME"], command="pip") as found:
        assert [grant.path for grant in found.grants] == [f"{prefix}/bin/pip"]


def test_a_link_of_another_user_is_a_strangers_word(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "shared").mkdir()
    (home / "shared/tool").symlink_to(home / "private/tool")
    monkeypatch.setenv("PATH", f"{home}/shared:{SYSTEM_PATH}")
    assert shown(home, "tool") == {"private/tool"}
    (home / "shared").chmod(0o1777)
    assert shown(home, "tool") == set()


def test_an_install_that_is_swapped_after_it_was_found_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving = sys.modules["stockade.resolve.resolution"]
    find = resolving.toolchain

    def swapping(*arguments: object) -> toolchains.Toolchain:
        found = find(*arguments)  # type: ignore[arg-type]
        (home / ".pyenv/versions/3.11.7").rename(home / "aside")
        (home / ".pyenv/versions/3.11.7").symlink_to(home / "private")
        return found

    monkeypatch.setattr(resolving, "toolchain", swapping)
    with pytest.raises(PolicyError, match="was replaced while it was looked up"):
        shown(home, "python3")


def test_what_is_denied_stays_hidden_also_in_an_install(home: Path) -> None:
    assert shown(home, "python3", deny=[str(home / ".pyenv")]) == set()


def test_a_projects_policy_cannot_ask_for_installs(home: Path) -> None:
    mine = Policy(toolchain=False)
    assert Policy().excess(mine) == ["toolchain: shows the installs that commands belong to"]
    assert Policy(toolchain=["aws"]).excess(Policy()) == ['toolchain = "aws"']
    assert mine.within(Policy()) and Policy().within(Policy(toolchain=["aws"]))


@pytest.mark.parametrize("name", ["pip.conf", "etc/npmrc", ".condarc"])
def test_passwords_for_package_indexes_are_hidden_in_an_install(home: Path, name: str) -> None:
    prefix = home / ".pyenv/versions/3.11.7"
    (prefix / name).parent.mkdir(exist_ok=True)
    (prefix / name).write_text(SECRET)
    program(prefix / "bin/python3.11", f"#!/bin/sh\ncat {prefix}/{name}; cat {prefix}/installed\n")
    result = stockade.run(["python3"], Policy(workspace=str(home / "project")))
    assert result.text == "3.11.7\n" and b"No such file" in result.stderr


def environments(base: Path, *names: str) -> None:
    """Environments as conda and pyenv-virtualenv keep them, each with a password."""
    for name in names:
        prefix = made.python(base / "envs" / name)
        for place in ("conda-meta/state", "etc/conda/activate.d/env_vars.sh", "pip.conf"):
            (prefix / place).parent.mkdir(parents=True, exist_ok=True)
            (prefix / place).write_text(SECRET)


@pytest.mark.parametrize("base", ["miniconda3", ".pyenv/versions/3.11.7"])
@pytest.mark.parametrize("mine", [False, True])
def test_a_base_does_not_bring_the_environments_of_other_work(home: Path, base: str, mine: bool) -> None:
    prefix = home / base
    if not prefix.exists():
        made.python(prefix)
    environments(prefix, "mine", "other")
    config(f"home = {{home}}/{base}/bin\n")(home)
    program(home / "project" / VENV, f"#!/bin/sh\nls {prefix} {prefix}/envs; grep -rs {SECRET!r} {prefix}\n")
    asked = [f"{prefix}/envs/mine/bin/python3"] if mine else True
    policy = Policy(workspace=str(home / "project"), toolchain=asked)  # type: ignore[arg-type]
    result = stockade.run([VENV], policy)
    assert "installed" in result.text and SECRET not in result.text
    assert ("mine" in result.text, "other" in result.text) == (mine, False)


def test_of_homebrew_the_data_and_settings_are_hidden(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brew = tmp_path / "linuxbrew"
    monkeypatch.setattr(installs, "WHOLE", (str(brew),))
    for name in ("var/db/table", "etc/my.cnf", "etc/openssl@3/private/key", "etc/ca-certificates/cert.pem"):
        (brew / name).parent.mkdir(parents=True, exist_ok=True)
        (brew / name).write_text(name)
    program(brew / "bin/tool", f"#!/bin/sh\ncat $(find {brew}/var {brew}/etc -type f)\n")
    monkeypatch.setenv("PATH", f"{brew}/bin:{SYSTEM_PATH}")
    result = stockade.run(["tool"], Policy(workspace=str(home / "project")))
    assert result.text == "etc/ca-certificates/cert.pem"


def test_a_variable_that_names_the_home_does_not_make_it_a_place_of_installs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(home))
    monkeypatch.setenv("PATH", f"{home}/private:{SYSTEM_PATH}")
    assert shown(home, "tool") == {"private/tool"}


def test_a_version_nested_without_end_chooses_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = made.rustup(home, "stable-x", chosen="stable-x")
    monkeypatch.setenv("PATH", f"{proxies}:{os.environ['PATH']}")
    (home / "project/rust-toolchain.toml").write_text("a = " + "[" * 4000)
    assert shown(home, "cargo") == {".rustup/toolchains/stable-x"}


@pytest.mark.parametrize("file", [".python-version", "rust-toolchain"])
def test_a_link_in_place_of_a_version_does_not_put_a_secret_into_the_message(
    home: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ssh/key").write_text("BEGIN-PRIVATE-KEY\n")
    proxies = made.rustup(home, "stable-x", chosen="stable-x")
    monkeypatch.setenv("PATH", f"{proxies}:{os.environ['PATH']}")
    link(file, "{home}/.ssh/key")(home)
    assert shown(home, "python3") == {".pyenv/versions/3.11.7"}
    assert shown(home, "cargo") == {".rustup/toolchains/stable-x"}


def planted_venv(home: Path, python: str, base: str, *, at: str = "project/.venv") -> None:
    """An environment that a repository brings along: whose Python it is, and where its base is said to be."""
    (home / at / "bin").mkdir(parents=True)
    (home / at / "bin/python3").symlink_to(python.format(home=home))
    (home / at / "pyvenv.cfg").write_text(f"home = {base.format(home=home)}\n")


#: Where the environment's Python and its pyvenv.cfg lead.
ENVIRONMENTS = {
    "to a secret": ("{home}/.ssh/agent", "{home}/.ssh"),
    "to a secret, on a relative way": ("../../../.ssh/agent", "../../../.ssh"),
    "to a program of the home": ("{home}/private/tool", "{home}/private"),
    "to another project": ("{home}/other/venv/bin/python3", "{home}/other/python/bin"),
    "from the system's Python to a secret": ("/usr/bin/python3", "{home}/.ssh"),
    "from the system's Python to the home": ("/usr/bin/python3", "{home}"),
    "through another link": ("{home}/project/way/agent", "{home}/project/way"),
    "through the state": ("/proc/self/root{home}/private/tool", "/proc/self/cwd"),
}


@pytest.mark.parametrize("command", ["", "sh", "check-it", "./run.sh"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_that_a_repository_brings_along_has_nothing_of_the_home_shown(
    home: Path, name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_venv(home, *ENVIRONMENTS[name])
    (home / "project/way").symlink_to(home / ".ssh")
    program(home / "project/.venv/bin/check-it", f"#!{home}/private/tool\n")
    program(home / "project/run.sh")
    monkeypatch.setenv("PATH", f"{home}/bin:{SYSTEM_PATH}")
    assert shown(home, command) == set()


def test_an_environment_of_a_repository_that_is_a_link_shows_nothing_of_another_project(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_venv(home, "/usr/bin/python3", "/usr/bin", at="other/.venv")
    program(home / "other/.venv/bin/check-it")
    (home / "project/.venv").symlink_to(home / "other/.venv")
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    assert shown(home, "check-it") == shown(home, "") == set()


@pytest.mark.parametrize("name", ["to a secret", "to a program of the home", "to another project"])
def test_without_the_judgement_a_repositorys_environment_gets_through(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_venv(home, *ENVIRONMENTS[name])
    search = lookup.ProgramSearch
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    monkeypatch.setattr(search, "_is_own", lambda self, prefix: True)
    monkeypatch.setattr(search, "_is_fit", lambda self, path: True)
    monkeypatch.setattr(
        installs,
        "is_install",
        lambda prefix: os.path.basename(prefix) in ("python", "venv", ".ssh", "private"),
    )
    assert shown(home, "") != set()


def test_nothing_of_a_repositorys_environment_is_executed_outside(home: Path, tmp_path: Path) -> None:
    """The supervisor reads two names of it: it starts no program, and imports no module."""
    proof = tmp_path / "executed"
    planted_venv(home, "/usr/bin/python3", "/usr/bin")
    packages = home / "project/.venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "evil.pth").write_text(f"import os; open({str(proof)!r}, 'w')\n")
    (packages / "sitecustomize.py").write_text(f"open({str(proof)!r}, 'w')\n")
    program(home / "project/.venv/bin/check-it", f"#!/bin/sh\necho inside; : > {proof}\n")
    result = stockade.run(["check-it"], Policy(workspace=str(home / "project")), on_exit="discard")
    assert result.text == "inside\n" and not proof.exists()
