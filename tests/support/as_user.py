"""Runs the suite as an ordinary user, for root.

The user, its copy of the source tree and its virtual environment (with the
wheel that was built from these sources) exist only for the run. They lie outside
the checkout, which an ordinary user may not be able to enter, and root owns
the environment, so that the tests cannot change it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from support.paths import ROOT
from support.wheel import DIST

NAME = "stockade-test"
HOME = Path("/var/lib") / NAME
PARENT = Path("/var/tmp")
GRACE = 3.0
PASSED_ON = ("CI", "STOCKADE_REQUIRE", DIST, "TERM", "NO_COLOR")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "bin", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
USABLE = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"


@contextlib.contextmanager
def ordinary_user() -> Iterator[pwd.struct_passwd]:
    """The user, made for the occasion unless it is there already."""
    made = False
    try:
        pwd.getpwnam(NAME)
    except KeyError:
        _make_user()
        made = True
    try:
        yield pwd.getpwnam(NAME)
    finally:
        if made:
            remove = ["userdel", "--remove", NAME] if shutil.which("userdel") else ["deluser", NAME]
            subprocess.run(remove, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            shutil.rmtree(HOME, ignore_errors=True)


@contextlib.contextmanager
def ground(user: pwd.struct_passwd, dist: Path) -> Iterator[Path]:
    """A directory with the user's copy of the sources (`source`) and an environment that has the wheel."""
    base = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=PARENT))
    old = os.umask(0o022)
    try:
        base.chmod(0o755)
        source = base / "source"
        shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_COPIED)
        _install(base, user, dist)
        _give(source, user)
        (base / "t").mkdir()
        _give(base / "t", user)
        yield base
    finally:
        os.umask(old)
        shutil.rmtree(base)


def pytest(
    base: Path, user: pwd.struct_passwd, arguments: list[str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start pytest in the user's copy."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    command = [str(base / "venv/bin/python"), "-m", "pytest", *arguments]
    return subprocess.Popen(
        command,
        cwd=base / "source",
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        **_identity(user, command, environment),
    )


def left_over(user: pwd.struct_passwd) -> list[str]:
    """What the user still has on the machine after a while. The processes among it are ended."""
    end = time.monotonic() + GRACE
    while (pids := _processes(user)) and time.monotonic() < end:
        time.sleep(0.05)
    found = [f"process {pid} ({name})" for pid, name in pids.items()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for directory in ("/tmp", "/var/tmp", "/dev/shm"):
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == user.pw_uid:
                    found.append(f"file {entry.path}")
    return found


def _make_user() -> None:
    if shutil.which("useradd"):
        # With subordinate ids, which only root can give it.
        command = ["useradd", "--system", "--add-subids-for-system", "--user-group"]
        command += ["--create-home", "--home-dir", str(HOME), "--shell", "/usr/sbin/nologin", NAME]
    else:
        command = ["adduser", "-S", "-D", "-h", str(HOME), NAME]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)


def _install(base: Path, user: pwd.struct_passwd, dist: Path) -> None:
    """Make the environment and put the wheel into it, with what the tests need."""
    python = _python(user)
    print(f"making an environment for {NAME} with {python}", flush=True)
    venv = base / "venv"
    pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-qq"]
    _do([python, "-m", "venv", str(venv)])
    copied = os.path.samefile(python, sys.executable) and _link_packages(Path(sys.prefix), venv)
    (wheel,) = dist.glob("stockade-*.whl")
    _do([*pip, "install", *(["--no-deps"] if copied else []), f"stockade[test] @ {wheel.as_uri()}"])
    if not copied:
        _do([*pip, "install", "--no-deps", "-r", str(base / "source/tests/requirements-alone.txt")])


def _link_packages(source: Path, target: Path) -> bool:
    """Give an environment what another one of the same Python has, apart from Stockade itself.

    The files are the same ones, which takes seconds; to install and compile them all again takes minutes.
    Whether that can be done: on one file system, where everybody may read them.
    """
    library = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    theirs, ours = (source / library).stat(), (target / library).stat()
    if theirs.st_dev != ours.st_dev or theirs.st_mode & 0o005 != 0o005:
        return False
    _do(["cp", "-r", "--link", "--force", f"{source / library}/.", str(target / library)])
    for own in [*(target / library).glob("__editable__*"), *(target / library).glob("stockade-*.dist-info")]:
        shutil.rmtree(own) if own.is_dir() else own.unlink()
    for script in (source / "bin").iterdir():
        copy = target / "bin" / script.name
        if not script.is_file() or script.is_symlink() or copy.exists() or script.name == "stockade":
            continue
        text = script.read_bytes()
        # A script's first line names its interpreter.
        copy.write_bytes(text.replace(bytes(source), bytes(target)) if text.startswith(b"#!") else text)
        copy.chmod(0o755)
    return True


def _do(command: list[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)


def _python(user: pwd.struct_passwd) -> str:
    """A Python that the user can run: the system's, unless it is too old or has no venv."""
    for candidate in ("/usr/bin/python3", getattr(sys, "_base_executable", sys.executable)):
        if os.path.exists(candidate) and _as(user, [candidate, "-c", USABLE]) == 0:
            return str(candidate)
    raise SystemExit(
        f"The user {NAME} can run no Python 3.11 with venv: install the system's, `apt install python3-venv`."
    )


def _as(user: pwd.struct_passwd, command: list[str]) -> int:
    """The exit code of a command that the user runs; nothing is shown."""
    try:
        return subprocess.run(
            command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            **_identity(user, command, {}),
        ).returncode
    except PermissionError:
        return 126


def _identity(user: pwd.struct_passwd, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The user's ids, no groups of root's, and an environment of its own."""
    clean = {
        "HOME": str(HOME),
        "USER": NAME,
        "LOGNAME": NAME,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "PATH": f"{Path(command[0]).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }
    return {
        "env": clean | dict(environment),
        "user": user.pw_uid,
        "group": user.pw_gid,
        "extra_groups": [],
    }


def _give(directory: Path, user: pwd.struct_passwd) -> None:
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _processes(user: pwd.struct_passwd) -> dict[int, str]:
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user.pw_uid or _real_uid(name) == user.pw_uid:
                found[int(name)] = Path(f"/proc/{name}/comm").read_text().strip()
    return found


def _real_uid(pid: str) -> int:
    # A process that is not dumpable has its /proc directory owned by root.
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nUid:")[2].split()[0])
