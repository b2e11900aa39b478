"""Where language installs are, and how to tell one from any other directory.

The code only reads the file system: it executes nothing, and trusts nothing
that a project wrote. A prefix is the directory of an install (with its bin,
lib and so on); it either has the layout of one, or lies where a known version
manager puts its installs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from stockade.resolve.toolchain.needs import is_file

#: How many directories above a program are checked for its install.
DEPTH = 6
#: Places of secrets below a home, which are never an install, whatever their layout.
SECRETS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".netrc", ".git-credentials",
    ".pki", ".mozilla", ".thunderbird", ".local/share/keyrings", ".config/gcloud", ".config/gh",
    ".config/stockade",
)  # fmt: skip
#: In a prefix: settings of package managers, which may contain a password.
CREDENTIALS = (
    "pip.conf", "etc/npmrc", ".npmrc", ".condarc", "condarc", "etc/gitconfig", "etc/pip.conf",
    "conda-meta/state", "etc/conda/activate.d", "etc/conda/deactivate.d",
)  # fmt: skip
#: In a prefix: other environments of the same install manager.
OTHERS = "envs"
#: What lies in a virtual environment. If there is more, it was made in a directory of other things, such as a
#: project, and only the parts that its Python needs are shown.
VENV_NAMES = frozenset(
    (
        "bin", "lib", "lib64", "include", "share", "pyvenv.cfg", "etc", "man", "pip.conf", "__pycache__",
        "pip-selfcheck.json", ".gitignore", ".lock", "CACHEDIR.TAG", "uv-receipt.toml", "pipx_metadata.json",
    )
)  # fmt: skip
VENV_PARTS = ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg")
#: Names that tell a home directory from others.
HOME_NAMES = (".ssh", ".gnupg", ".aws", ".kube", ".bash_history", ".bashrc", ".profile")
#: Version managers: the variable that moves their tree, the tree below the home, the directory of installs
#: in it, and how many levels below that each install lies.
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
#: The same for the whole machine: the directory, and the levels below it.
SHARED: tuple[tuple[str, int], ...] = (("/opt", 1), ("/nix/store", 0), ("/home/linuxbrew/.linuxbrew", 0))

#: Installs whose programs need each other, and which everybody may read anyway: shown as a whole.
WHOLE = ("/nix/store", "/home/linuxbrew/.linuxbrew")
#: Hidden in those: data of servers, and settings except what programs need to start and for certificates.
DATA, SETTINGS = "var", "etc"
PUBLIC_SETTINGS = ("ca-certificates", "openssl@1.1", "openssl@3", "fonts", "ld.so.conf", "ld.so.conf.d")
PRIVATE_KEYS = ("openssl@1.1/private", "openssl@3/private")


class InstallRoot(msgspec.Struct, frozen=True):
    """A directory in which every directory `depth` levels down is an install."""

    path: str
    depth: int

    def prefix(self, path: str) -> str:
        """The install that a path lies in; empty if it lies in none."""
        if not path.startswith(self.path + "/"):
            return ""
        parts = path[len(self.path) + 1 :].split("/")
        return "/".join((self.path, *parts[: self.depth])) if len(parts) > self.depth else ""


def places(home: str, environ: Mapping[str, str]) -> list[InstallRoot]:
    """The real names of the directories in which this user's installs lie."""
    found = [InstallRoot(path, depth) for path, depth in SHARED]
    found += [InstallRoot(f"{home}/{name}", 0) for name in CONDAS]
    for variable, below, inner, depth in MANAGERS:
        for root in (f"{home}/{below}", environ.get(variable, "") if variable else ""):
            place = os.path.realpath(os.path.join(root, inner)) if root.startswith("/") else ""
            # A variable that names the home, or a directory above it, is ignored.
            if place and not f"{home}/".startswith(f"{place.rstrip('/')}/"):
                found.append(InstallRoot(place, depth))
    return found


def above(path: str) -> Iterator[str]:
    """The directories above a program that may be its install, the nearest first."""
    for _ in range(DEPTH):
        path = os.path.dirname(path)
        if path in ("/", ""):
            return
        yield path


def private_paths(tree: str, used: Collection[str]) -> Iterator[str]:
    """The paths to hide in an install that is shown because the paths `used` need it."""
    yield from (f"{tree}/{name}" for name in CREDENTIALS)
    others = f"{tree}/{OTHERS}"
    inner = {path[len(others) + 1 :].partition("/")[0] for path in used if path.startswith(f"{others}/")}
    yield from (f"{others}/{own}/{name}" for own in sorted(inner) for name in CREDENTIALS)
    yield from (f"{others}/{name}" for name in names_in(others) if name not in inner) if inner else (others,)
    if tree in WHOLE:
        yield f"{tree}/{DATA}"
        settings = {*names_in(f"{tree}/{SETTINGS}")} - {*PUBLIC_SETTINGS}
        yield from (f"{tree}/{SETTINGS}/{name}" for name in sorted(settings | {*PRIVATE_KEYS}))


def parts(prefix: str) -> list[str]:
    """The paths to show of an install: all of it, or the parts of a virtual environment in a project."""
    if not is_venv(prefix) or VENV_NAMES.issuperset(names_in(prefix)):
        return [prefix]
    return [path for name in VENV_PARTS if os.path.lexists(path := f"{prefix}/{name}")]


def names_in(directory: str) -> list[str]:
    """The sorted names in a directory; none if it cannot be listed."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def is_program(path: str) -> bool:
    """Whether a path is a file that the user may execute."""
    return os.access(path, os.X_OK) and is_file(path)


def is_venv(prefix: str) -> bool:
    """Whether a directory is a virtual environment of Python."""
    return is_file(f"{prefix}/pyvenv.cfg") and os.path.isdir(f"{prefix}/bin")


def _is_python(prefix: str) -> bool:
    if not os.path.isdir(f"{prefix}/bin"):
        return False
    return any(
        name.startswith(("python", "pypy")) and is_file(f"{prefix}/lib/{name}/os.py")
        for name in names_in(f"{prefix}/lib")
    )


def _contains(*names: str) -> Callable[[str], bool]:
    return lambda prefix: all(os.path.exists(f"{prefix}/{name}") for name in names)


#: A check for each kind of install, by what lies in its prefix.
KINDS: tuple[Callable[[str], bool], ...] = (
    is_venv,
    _contains("conda-meta", "bin"),
    _is_python,
    _contains("bin/node", "lib/node_modules/npm"),
    _contains("bin/go", "VERSION", "pkg/tool"),
    _contains("bin/rustc", "lib/rustlib"),
    _contains("bin/java", "release"),
    _contains("bin/ruby", "lib/ruby"),
)


def is_install(prefix: str) -> bool:
    """Whether a directory has the layout of a language install."""
    return any(kind(prefix) for kind in KINDS)


def looks_like_home(path: str) -> bool:
    """Whether a directory looks like the home of a user."""
    return any(os.path.lexists(f"{path}/{name}") for name in HOME_NAMES)
