"""Where language installs are, and how one is told from any other directory.

Pure questions to the file system: nothing is executed, and nothing that a
project wrote is believed. A prefix is the directory that an install lives in
(its bin, lib and so on); it is either laid out like one, or lies where a known
version manager puts its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from stockade.policy.toolchain import is_file

#: How far above a program its install's directory is looked for.
DEPTH = 6
#: No install of a language, however it is laid out: what people keep secrets in, below their home.
SECRETS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".netrc", ".git-credentials",
    ".pki", ".mozilla", ".thunderbird", ".local/share/keyrings", ".config/gcloud", ".config/gh",
    ".config/stockade",
)  # fmt: skip
#: In a prefix: settings of package managers, which may have a password in them.
CREDENTIALS = (
    "pip.conf", "etc/npmrc", ".npmrc", ".condarc", "condarc", "etc/gitconfig", "etc/pip.conf",
    "conda-meta/state", "etc/conda/activate.d", "etc/conda/deactivate.d",
)  # fmt: skip
#: In a prefix: installs for other work, which have no part in this one.
OTHERS = "envs"
#: The first names of those are enough to tell a home by.
HOMELY = (".ssh", ".gnupg", ".aws", ".kube", ".bash_history", ".bashrc", ".profile")
#: Trees that hold one install in each directory so many levels down, with the variable that moves them.
#: What is below is counted from the home.
MANAGERS: tuple[tuple[str, str, str, int], ...] = (
    ("PYENV_ROOT", ".pyenv", "versions", 1),
    ("RBENV_ROOT", ".rbenv", "versions", 1),
    ("NODENV_ROOT", ".nodenv", "versions", 1),
    ("NVM_DIR", ".nvm", "versions/node", 1),
    ("NVM_DIR", ".config/nvm", "versions/node", 1),
    ("FNM_DIR", ".local/share/fnm", "node-versions", 1),
    ("FNM_DIR", ".fnm", "node-versions", 1),
    ("RUSTUP_HOME", ".rustup", "toolchains", 1),
    ("UV_PYTHON_INSTALL_DIR", ".local/share/uv/python", "", 1),
    ("UV_TOOL_DIR", ".local/share/uv/tools", "", 1),
    ("PIPX_HOME", ".local/share/pipx", "venvs", 1),
    ("PIPX_HOME", ".local/pipx", "venvs", 1),
    ("SDKMAN_DIR", ".sdkman", "candidates", 2),
    ("MISE_DATA_DIR", ".local/share/mise", "installs", 2),
    ("ASDF_DATA_DIR", ".asdf", "installs", 2),
    ("VOLTA_HOME", ".volta", "tools/image", 2),
    ("", "sdk", "", 1),
)
CONDAS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba")
#: The same for the whole machine.
SHARED: tuple[tuple[str, int], ...] = (("/opt", 1), ("/nix/store", 0), ("/home/linuxbrew/.linuxbrew", 0))

#: Installs whose programs need each other, wherever in it they are; everybody may read them anyway.
WHOLE = ("/nix/store", "/home/linuxbrew/.linuxbrew")
#: Of those: the data of servers, and settings but for what programs need to start and to know certificates.
DATA, SETTINGS = "var", "etc"
PUBLIC_SETTINGS = ("ca-certificates", "openssl@1.1", "openssl@3", "fonts", "ld.so.conf", "ld.so.conf.d")
PRIVATE_KEYS = ("openssl@1.1/private", "openssl@3/private")


class Place(msgspec.Struct, frozen=True):
    """A directory whose inner directories, `depth` levels down, are installs."""

    path: str
    depth: int

    def prefix(self, path: str) -> str:
        """The install that a path is in, or nothing."""
        if not path.startswith(self.path + "/"):
            return ""
        parts = path[len(self.path) + 1 :].split("/")
        return "/".join((self.path, *parts[: self.depth])) if len(parts) > self.depth else ""


def places(home: str, environ: Mapping[str, str]) -> list[Place]:
    """Where this user's installs are, by their real names."""
    found = [Place(path, depth) for path, depth in SHARED]
    found += [Place(f"{home}/{name}", 0) for name in CONDAS]
    for variable, below, inner, depth in MANAGERS:
        for root in (f"{home}/{below}", environ.get(variable, "") if variable else ""):
            place = os.path.realpath(os.path.join(root, inner)) if root.startswith("/") else ""
            # A variable that names the home, or what is above it, moves nothing there.
            if place and not f"{home}/".startswith(f"{place.rstrip('/')}/"):
                found.append(Place(place, depth))
    return found


def above(path: str) -> Iterator[str]:
    """The directories that a program is in, the nearest first, as far up as its install may begin."""
    for _ in range(DEPTH):
        path = os.path.dirname(path)
        if path in ("/", ""):
            return
        yield path


def private(tree: str, used: Collection[str]) -> Iterator[str]:
    """What is to be hidden in a tree that is shown for the sake of these paths."""
    yield from (f"{tree}/{name}" for name in CREDENTIALS)
    others = f"{tree}/{OTHERS}"
    inner = {path[len(others) + 1 :].partition("/")[0] for path in used if path.startswith(f"{others}/")}
    yield from (f"{others}/{own}/{name}" for own in sorted(inner) for name in CREDENTIALS)
    yield from (f"{others}/{name}" for name in names_in(others) if name not in inner) if inner else (others,)
    if tree in WHOLE:
        yield f"{tree}/{DATA}"
        settings = {*names_in(f"{tree}/{SETTINGS}")} - {*PUBLIC_SETTINGS}
        yield from (f"{tree}/{SETTINGS}/{name}" for name in sorted(settings | {*PRIVATE_KEYS}))


def names_in(directory: str) -> list[str]:
    """What a directory holds; nothing if it cannot be listed."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def is_program(path: str) -> bool:
    """Whether it is a file that the caller may execute."""
    return os.access(path, os.X_OK) and is_file(path)


def is_venv(prefix: str) -> bool:
    """A virtual environment of Python's."""
    return is_file(f"{prefix}/pyvenv.cfg") and os.path.isdir(f"{prefix}/bin")


def _python(prefix: str) -> bool:
    if not os.path.isdir(f"{prefix}/bin"):
        return False
    return any(
        name.startswith(("python", "pypy")) and is_file(f"{prefix}/lib/{name}/os.py")
        for name in names_in(f"{prefix}/lib")
    )


def _all(*names: str) -> Callable[[str], bool]:
    return lambda prefix: all(os.path.exists(f"{prefix}/{name}") for name in names)


#: Each kind of install, by what lies in its prefix.
KINDS: tuple[Callable[[str], bool], ...] = (
    is_venv,
    _all("conda-meta", "bin"),
    _python,
    _all("bin/node", "lib/node_modules/npm"),
    _all("bin/go", "VERSION", "pkg/tool"),
    _all("bin/rustc", "lib/rustlib"),
    _all("bin/java", "release"),
    _all("bin/ruby", "lib/ruby"),
)


def is_install(prefix: str) -> bool:
    """Whether the directory is laid out like the install of a language."""
    return any(kind(prefix) for kind in KINDS)


def is_homely(path: str) -> bool:
    """Whether the directory looks like somebody's home."""
    return any(os.path.lexists(f"{path}/{name}") for name in HOMELY)
