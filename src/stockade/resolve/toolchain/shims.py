"""Find the program that a version manager's shim would start, without starting the shim.

A shim reads the version from a project's own files (`.python-version`,
`rust-toolchain`). These are untrusted text: they may choose among the versions
that the user has installed, and nothing else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from stockade.errors import PolicyError
from stockade.resolve.toolchain.installs import is_program

#: Managers whose shims are alike: the variable, the file in a project, and the command.
MANAGERS = {
    b"PYENV_ROOT": ("PYENV_VERSION", ".python-version", "pyenv"),
    b"RBENV_ROOT": ("RBENV_VERSION", ".ruby-version", "rbenv"),
    b"NODENV_ROOT": ("NODENV_VERSION", ".node-version", "nodenv"),
}
SYSTEM = "system"
LARGEST = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def through(path: str, cwd: str, environ: Mapping[str, str], home: str) -> str | None:
    """The program behind a shim; the path itself if it is not a shim; None for the system's program."""
    if os.path.basename(os.path.dirname(path)) == "shims":
        head = first_bytes(path)
        for mark, (variable, file, manager) in MANAGERS.items():
            if mark in head:
                return _find_version(path, cwd, environ.get(variable, ""), file, manager)
    directory, name = os.path.split(path)
    if name != "rustup" and _is_same_file(path, f"{directory}/rustup"):
        return _find_in_rustup(path, cwd, environ, home)
    return path


def behind(directory: str, cwd: str, environ: Mapping[str, str]) -> list[str]:
    """The directory of the programs behind a directory of shims; none if it is not one."""
    if os.path.basename(directory) != "shims":
        return []
    for name in ("python3", "python", "ruby", "node"):
        try:
            found = through(f"{directory}/{name}", cwd, environ, "")
        except PolicyError:
            continue
        if found and found != f"{directory}/{name}":
            return [os.path.realpath(os.path.dirname(found))]
    return []


def first_bytes(path: str, most: int = LARGEST, *, links: bool = True) -> bytes:
    """Read the beginning of a regular file; nothing of any other file. Never blocks, not even on a pipe."""
    follow = 0 if links else os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | follow)
    except OSError:
        return b""
    try:
        return os.read(fd, most) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def _find_version(path: str, cwd: str, variable: str, file: str, manager: str) -> str | None:
    root, name = os.path.dirname(os.path.dirname(path)), os.path.basename(path)
    versions, source = _wanted_versions(root, cwd, variable, file)
    for version in versions:
        if version == SYSTEM:
            return None
        installed = _installed(f"{root}/versions", version)
        if installed and is_program(found := f"{root}/versions/{installed}/bin/{name}"):
            return found
    chosen = ", ".join(versions[:3]) or "nothing"
    raise PolicyError(
        f"{name}: {manager} has no {name} in the chosen version: {chosen} ({source})",
        hint=f"install it, choose another ({manager} versions), or use the system's {name}: --no-toolchain",
    )


def _wanted_versions(root: str, cwd: str, variable: str, file: str) -> tuple[list[str], str]:
    """The versions to try in order, and where they are set."""
    if variable:
        return _names(variable.replace(":", "\n")), "your environment"
    for directory in _upwards(cwd):
        if found := _names(_read_project_file(f"{directory}/{file}")):
            return found, f"{directory}/{file}"
    if found := _names(first_bytes(f"{root}/version").decode("utf-8", "replace")):
        return found, f"{root}/version"
    return [SYSTEM], "nothing is set"


def _read_project_file(path: str) -> str:
    """Read a project's file through no link: it could lead to a private file, and its text into a message."""
    return first_bytes(path, links=False).decode("utf-8", "replace")


def _names(text: str) -> list[str]:
    """The words of a text that are names of versions, and could not be a path elsewhere."""
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    return [part for line in words for word in line for part in word.split(":") if _NAME.fullmatch(part)]


def _installed(versions: str, name: str) -> str:
    """The version of that name, or the newest that begins with it."""
    if os.path.isdir(f"{versions}/{name}"):
        return name
    wanted = name.removeprefix("python-")
    try:
        known = os.listdir(versions)
    except OSError:
        return ""
    near = [one for one in known if one == wanted or re.fullmatch(re.escape(wanted) + r"\.\d+", one)]
    return max(near, key=lambda one: [int(number) for number in re.findall(r"\d+", one)], default="")


def _find_in_rustup(path: str, cwd: str, environ: Mapping[str, str], home: str) -> str:
    """Find the program in the toolchain that rustup would choose."""
    name = os.path.basename(path)
    root = environ.get("RUSTUP_HOME", "")
    root = root if root.startswith("/") else f"{home}/.rustup"
    settings = _parse_toml(first_bytes(f"{root}/settings.toml", 1 << 20).decode("utf-8", "replace"))
    channel, source = _channel(cwd, environ, settings)
    triple = settings.get("default_host_triple", "")
    for one in (channel, f"{channel}-{triple}", *_toolchains_of(f"{root}/toolchains", channel)):
        if _NAME.fullmatch(one) and is_program(found := f"{root}/toolchains/{one}/bin/{name}"):
            return found
    raise PolicyError(
        f"{name}: rustup has no {name} in the chosen toolchain: {channel or 'none'} ({source})",
        hint=f"install it, choose another: RUSTUP_TOOLCHAIN=..., or use the system's {name}: --no-toolchain",
    )


def _channel(cwd: str, environ: Mapping[str, str], settings: Mapping[str, object]) -> tuple[str, str]:
    if named := environ.get("RUSTUP_TOOLCHAIN"):
        return named, "your environment"
    overrides = settings.get("overrides")
    for directory in _upwards(cwd):
        if isinstance(overrides, dict) and isinstance(named := overrides.get(directory), str):
            return named, "rustup override"
        for file in ("rust-toolchain", "rust-toolchain.toml"):
            text = _read_project_file(f"{directory}/{file}")
            if "[" not in text and text.split():
                return text.split()[0][:64], f"{directory}/{file}"
            table = _parse_toml(text).get("toolchain")
            # Its `path` would be a directory of the project's choice, and is ignored.
            if isinstance(table, dict) and isinstance(named := table.get("channel"), str):
                return named[:64], f"{directory}/{file}"
    default = settings.get("default_toolchain")
    return (default, "rustup default") if isinstance(default, str) else ("", "nothing is set")


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; empty if it is invalid or nested too deeply for the parser."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def _toolchains_of(toolchains: str, channel: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(toolchains) if channel and name.startswith(f"{channel}-"))
    except OSError:
        return []


def _upwards(directory: str) -> Iterator[str]:
    while directory.startswith("/"):
        yield directory
        if directory == "/":
            return
        directory = os.path.dirname(directory)


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
