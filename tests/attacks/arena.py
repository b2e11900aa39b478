"""Where attacks are run: the same program behind the walls and without them.

An attack is a file in `attacks/`. It is given its arguments on the command
line and prints one line of JSON, its verdict: what the kernel answered, by
the name of the error or "ok". `inside` runs it in a sandbox of its own,
`outside` as an ordinary process. Where the attack would harm the host, or is
beyond an ordinary user, the control runs as the owner of namespaces that are
thrown away with it (`namespaces=`): that shows that the call itself works.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import stockade
from stockade import Policy, Result
from support.means import need, need_program

ATTACKS = Path(__file__).parent / "programs"
PYTHON = "/usr/bin/python3"
SECONDS = 60
IS_ROOT = os.geteuid() == 0
UNSHARE = {
    "user": ["--user", "--map-root-user"],
    "mnt": ["--mount"],
    "pid": ["--pid", "--fork", "--kill-child", "--mount-proc"],
    "net": ["--net"],
    "ipc": ["--ipc"],
    "uts": ["--uts"],
}
#: The files of this directory are not shown inside: an attack comes in as words of the command line.
LOADER = """
import sys, types
common = sys.modules["common"] = types.ModuleType("common")
exec(sys.argv.pop(1), common.__dict__)
exec(sys.argv.pop(1), {"__name__": "__main__"})
"""
#: Set by the session: where attacks that are written in C are built.
build_directory = Path()


def inside(attack: str, *arguments: object, **policy: Any) -> Any:
    """The verdict of an attack in a sandbox with that policy."""
    result = run(attack, *arguments, **policy)
    assert result.outcome == "exited" and result.exit_code == 0, (result.reason, result.stderr.decode())
    return verdict_of(result.stdout)


def run(attack: str, *arguments: object, cwd: str | None = None, **policy: Any) -> Result:
    """How an attack in a sandbox with that policy ended."""
    command, program = command_of(attack, *arguments)
    policy["read"] = [*policy.get("read", ()), *program]
    return stockade.run(command, Policy(**policy), cwd=cwd, timeout=SECONDS, on_exit="discard")


def outside(attack: str, *arguments: object, namespaces: str = "", **options: Any) -> Any:
    """The verdict of the same attack without a sandbox."""
    done = run_outside(attack, *arguments, namespaces=namespaces, **options)
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
    return verdict_of(done.stdout)


def run_outside(
    attack: str, *arguments: object, namespaces: str = "", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """How the same attack ended without a sandbox."""
    command, _ = command_of(attack, *arguments)
    if namespaces:
        flags = [flag for name in namespaces.split() for flag in UNSHARE[name]]
        command = [need_program("unshare"), *flags, *command]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False, **options
    )


def compiled(name: str) -> Path:
    """A program of `attacks/`, built without any library that a sandbox would have to show."""
    return _compiled(name, build_directory)


@functools.cache
def _compiled(name: str, directory: Path) -> Path:
    target = directory / name.removesuffix(".c")
    command = [
        need_program("gcc"),
        "-static",
        "-pthread",
        "-O1",
        "-Wall",
        "-o",
        str(target),
        str(ATTACKS / name),
    ]
    subprocess.run(command, check=True)
    return target


def command_of(attack: str, *arguments: object) -> tuple[list[str], list[str]]:
    """The command line of an attack, and what a policy has to show for it."""
    words = [str(argument) for argument in arguments]
    if attack.endswith(".c"):
        program = str(compiled(attack))
        return [program, *words], [program]
    need(os.path.exists(PYTHON), f"{PYTHON} is not installed")
    sources = [(ATTACKS / name).read_text() for name in ("common.py", f"{attack}.py")]
    return [PYTHON, "-I", "-c", LOADER, *sources, *words], []


def verdict_of(output: bytes) -> Any:
    """The last line of an attack's output."""
    lines = output.decode().splitlines()
    assert lines, "the attack said nothing"
    return json.loads(lines[-1])
