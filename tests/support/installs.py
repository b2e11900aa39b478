"""Pretend language installs below a pretend home, laid out as the real ones are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stockade.resolve.toolchain.needs import LINKS

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: The PATH inside, and the link in it by which `python` starts the system's python3, where it is needed.
PATH_INSIDE = SYSTEM_PATH if shutil.which("python", path=SYSTEM_PATH) else f"{SYSTEM_PATH}:{LINKS}"
LINKS_INSIDE: dict[str, str] = {} if PATH_INSIDE == SYSTEM_PATH else {f"{LINKS}/python": "/usr/bin/python3"}
SHIM = '#!/usr/bin/env bash\nexport {variable}="{root}"\nexec "{root}/libexec/x" exec "${{0##*/}}" "$@"\n'
#: Says which file runs, under which name, and that its install is there.
PROGRAM = '#!/bin/sh\necho "ran $0 in" $(cat "{prefix}/installed")\n'


def program(path: Path, text: str = "#!/bin/sh\necho ran $0\n") -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(prefix: Path, *names: str) -> Path:
    """A directory with programs that need another file of it."""
    for name in names:
        program(prefix / "bin" / name, PROGRAM.format(prefix=prefix))
    (prefix / "installed").write_text(f"{prefix.name}\n")
    return prefix


def python(prefix: Path, version: str = "3.11") -> Path:
    """A Python: its library is what tells it from any other directory."""
    install(prefix, f"python{version}", "pip")
    for name in ("python", "python3"):
        (prefix / "bin" / name).symlink_to(f"python{version}")
    library = prefix / "lib" / f"python{version}"
    library.mkdir(parents=True)
    (library / "os.py").write_text("")
    return prefix


def venv(prefix: Path, base: Path, *, copies: bool = False) -> Path:
    """A virtual environment of that Python."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(f"home = {base}/bin\nversion = 3.11.7\n")
    if copies:
        # As the real one, it finds its library by the file.
        program(prefix / "bin/python3", f'#!/bin/sh\necho "ran $0 in" $(cat "{base}/installed")\n')
    else:
        (prefix / "bin/python3").symlink_to(f"{base}/bin/python3")
    return prefix


def pyenv(root: Path, *versions: str, chosen: str = "") -> Path:
    """pyenv with its shims; the directory of the shims is what belongs into a PATH."""
    for version in versions:
        python(root / "versions" / version)
    for name in ("python3", "pip"):
        program(root / "shims" / name, SHIM.format(variable="PYENV_ROOT", root=root))
    if chosen:
        (root / "version").write_text(f"{chosen}\n")
    return root / "shims"


def rustup(home: Path, *toolchains: str, chosen: str) -> Path:
    """rustup with its proxies, all of them one file."""
    for name in toolchains:
        prefix = install(home / ".rustup/toolchains" / name, "cargo", "rustc")
        (prefix / "lib/rustlib").mkdir(parents=True)
    (home / ".rustup/settings.toml").write_text(f'default_toolchain = "{chosen}"\n[overrides]\n')
    proxies = home / ".cargo/bin"
    program(proxies / "rustup")
    for name in ("cargo", "rustc"):
        os.link(proxies / "rustup", proxies / name)
    return proxies
