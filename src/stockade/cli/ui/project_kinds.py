"""Recognize what kind of project a directory holds, from the files of its tools.

Nothing of the project is run, and its files are read as data: they only select
among the words written here, and no text of theirs reaches the policy.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import NamedTuple

#: How much of a file is read.
MOST = 1 << 20


class ProjectKind(NamedTuple):
    """What is known about one kind of project."""

    language: str
    #: The tool that installs its dependencies, and how; that happens outside, where there is a network.
    manager: str
    install: str
    #: The command that runs its tests.
    command: tuple[str, ...]
    env: dict[str, str]
    #: Programs that it needs; where they are decides what the policy shows.
    tools: tuple[str, ...]
    #: What they need from the home, if they are not the system's own.
    caches: tuple[str, ...] = ()


def kinds(directory: str) -> list[ProjectKind]:
    """Return every kind that the directory shows signs of, the likeliest first."""
    look = (_node, _python, _rust, _go, _deno, _java, _ruby, _cmake, _meson, _make)
    found = [kind for kind in (one(_ProjectFiles(directory)) for one in look) if kind is not None]
    # A manifest beside a Makefile says more than the Makefile; one with tests more than one without.
    return sorted(found, key=lambda kind: not kind.command)


class _ProjectFiles:
    """The top of a project."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def has(self, *names: str) -> str:
        """Return the first of these names that exists, or ""."""
        return next((name for name in names if os.path.exists(os.path.join(self.directory, name))), "")

    def text(self, name: str) -> str:
        try:
            # O_NONBLOCK: a pipe in place of the file would block us until it has a writer.
            file = os.open(os.path.join(self.directory, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return ""
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read(MOST) if stat.S_ISREG(os.fstat(file).st_mode) else ""

    def below(self, name: str, beginning: str, end: str) -> bool:
        """Whether a directory has a file whose name begins and ends so."""
        try:
            names = os.listdir(os.path.join(self.directory, name))
        except OSError:
            return False
        return any(one.startswith(beginning) and one.endswith(end) for one in names)


def _python(files: _ProjectFiles) -> ProjectKind | None:
    manifest = files.has("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "tox.ini", "Pipfile")
    tests = any(files.below(name, "test", ".py") for name in ("tests", "test", "."))
    if not manifest and not tests:
        return None
    managers = {
        "uv.lock": ("uv", "uv sync"),
        "poetry.lock": ("poetry", "poetry install"),
        "pdm.lock": ("pdm", "pdm install"),
        "Pipfile": ("pipenv", "pipenv install --dev"),
        "requirements.txt": ("pip", "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"),
    }
    known = files.has(*managers)
    manager, install = managers.get(known, ("pip", ""))
    venv = files.has(".venv/bin/python", "venv/bin/python", "env/bin/python")
    words = "".join(
        map(files.text, ("pyproject.toml", "setup.cfg", "tox.ini", "requirements.txt", "Pipfile"))
    )
    pytest = bool(files.has("pytest.ini", "conftest.py", "tests/conftest.py")) or "pytest" in words
    if not pytest and venv:
        pytest = bool(files.has(venv.replace("/python", "/pytest")))
    if not pytest and not tests:
        command: tuple[str, ...] = ()
    elif pytest:
        command = (venv or "python3", "-m", "pytest", "-p", "no:cacheprovider")
    else:
        command = (venv or "python3", "-m", "unittest", "discover")
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    return ProjectKind("Python", manager, install, command, env, (venv or "python3",))


def _node(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("package.json"):
        return None
    import json

    managers = {
        "pnpm-lock.yaml": ("pnpm", "pnpm install"),
        "yarn.lock": ("yarn", "yarn install"),
        "bun.lockb": ("bun", "bun install"),
        "bun.lock": ("bun", "bun install"),
        "package-lock.json": ("npm", "npm ci"),
    }
    manager, install = managers.get(files.has(*managers), ("npm", "npm install"))
    try:
        manifest = json.loads(files.text("package.json"))
        script = manifest.get("scripts", {}).get("test", "")
    except (ValueError, AttributeError):
        script = ""
    # The script that `npm init` writes fails on purpose.
    tested = isinstance(script, str) and script and "no test specified" not in script
    env = {"CI": "1", "npm_config_update_notifier": "false"}
    command = (manager, "run", "test") if manager == "bun" else (manager, "test")
    return ProjectKind("JavaScript", manager, install, command if tested else (), env, ("node", manager))


def _rust(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("Cargo.toml"):
        return None
    command = ("cargo", "test", "--offline")
    return ProjectKind(
        "Rust", "cargo", "cargo fetch", command, {}, ("cargo", "rustc"), ("~/.cargo/registry?", "~/.rustup?")
    )


def _go(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("go.mod"):
        return None
    env = {"GOPROXY": "off", "GOFLAGS": "-buildvcs=false"}
    return ProjectKind(
        "Go", "go", "go mod download", ("go", "test", "./..."), env, ("go",), ("~/go/pkg/mod?",)
    )


def _deno(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("deno.json", "deno.jsonc"):
        return None
    command = ("deno", "test", "--cached-only")
    return ProjectKind("TypeScript", "deno", "deno install", command, {}, ("deno",))


def _java(files: _ProjectFiles) -> ProjectKind | None:
    if files.has("pom.xml"):
        own = files.has("mvnw")
        command = (f"./{own}" if own else "mvn", "--offline", "test")
        return ProjectKind(
            "Java", "Maven", "mvn dependency:go-offline", command, {}, ("java",), ("~/.m2/repository?",)
        )
    if files.has("build.gradle", "build.gradle.kts"):
        own = files.has("gradlew")
        command = (f"./{own}" if own else "gradle", "--offline", "test")
        return ProjectKind(
            "Java", "Gradle", "gradle dependencies", command, {}, ("java",), ("~/.gradle/wrapper?",)
        )
    return None


def _ruby(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("Gemfile"):
        return None
    tool = ("rspec",) if files.has("spec") else ("rake", "test")
    return ProjectKind("Ruby", "bundler", "bundle install", ("bundle", "exec", *tool), {}, ("ruby", "bundle"))


def _cmake(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("CMakeLists.txt"):
        return None
    steps = "cmake -B build && cmake --build build && ctest --test-dir build --output-on-failure"
    return ProjectKind("C and C++", "CMake", "", ("sh", "-c", steps), {}, ("cmake", "cc"))


def _meson(files: _ProjectFiles) -> ProjectKind | None:
    if not files.has("meson.build"):
        return None
    steps = "meson setup build && meson test -C build"
    return ProjectKind("C and C++", "Meson", "", ("sh", "-c", steps), {}, ("meson", "cc"))


def _make(files: _ProjectFiles) -> ProjectKind | None:
    name = files.has("GNUmakefile", "Makefile", "makefile")
    if not name:
        return None
    lines = files.text(name).splitlines()
    target = next(
        (word for word in ("check", "test") if any(line.startswith(f"{word}:") for line in lines)), ""
    )
    sources = files.below(".", "", ".c") or files.below("src", "", ".c")
    language = "C" if sources else "make"
    tools = ("make", "cc") if sources else ("make",)
    return ProjectKind(language, "make", "", ("make", target) if target else (), {}, tools)


def place(tool: str, directory: str) -> str:
    """Return the real path of a program, or "" if it is not found."""
    found = os.path.join(directory, tool) if "/" in tool else shutil.which(tool) or ""
    return os.path.realpath(found) if found and os.path.exists(found) else ""
