"""Jupyter kernels in sandboxes: a kernel provisioner, and the command that registers such a kernel.

    python -m stockade.integrations.jupyter install --user

The kernel gets the policy of its kernel.json, else the directory of the notebook as an overlay workspace. It
has no network and needs none: it talks through sockets in a directory of its own. The sandbox lives until the
kernel is shut down; a restarted kernel finds the files of the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from stockade.errors import PolicyError, StockadeError
from stockade.integrations import needs_extra
from stockade.integrations.jupyter_relay import PLAIN_TYPES, KernelRelay
from stockade.linux import dirwalk
from stockade.policy.model import Policy, policy_or_default
from stockade.policy.values import literal
from stockade.runs.options import WAYS
from stockade.sandbox.process import Process
from stockade.sandbox.sandbox import Sandbox
from stockade.sandbox.workspace import Workspace

with needs_extra("jupyter"):
    from jupyter_client.connect import KernelConnectionInfo
    from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
    from traitlets import Dict, Enum, List, Unicode, Union

#: The name in kernel.json.
NAME = "stockade-provisioner"
_PREFIX = "stockade-kernel-"
#: The address of a unix socket has at most 107 bytes: the directory, one of the two in it, and a number.
_LONGEST_DIRECTORY = 80
_PORTS = ("shell", "iopub", "stdin", "control", "hb")
_GRACE = 2.0
_LONGEST_LINE = 1000


class StockadeProvisioner(KernelProvisionerBase):
    """Starts a kernel in a sandbox. Its traits are the `config` of the provisioner in kernel.json."""

    policy: Any = Union(
        [Unicode(), Dict()],
        default_value=None,
        allow_none=True,
        help="A policy: its clauses, or the absolute path of its file. Without one, the directory of the "
        "notebook is an overlay workspace.",
    ).tag(config=True)
    on_exit: Any = Enum(
        WAYS, default_value="keep", help="What happens to the changes in an overlay workspace."
    ).tag(config=True)
    display: Any = Union(
        [Enum(["all"]), List(Unicode())],
        default_value=list(PLAIN_TYPES),
        help='The display types that reach the page. "all" lets widgets pass too.',
    ).tag(config=True)

    _sandbox: Sandbox | None = None
    _process: Process | None = None
    _relay: KernelRelay | None = None
    _sockets: SocketDirectory | None = None

    @property
    def has_process(self) -> bool:
        """Whether a kernel was started and has not been waited for."""
        return self._process is not None

    async def poll(self) -> int | None:
        """Return None while the kernel runs, else its exit code."""
        result = None if self._process is None else self._process.poll()
        if result is None:
            return 0 if self._process is None else None
        return result.exit_code

    async def wait(self) -> int | None:
        """Wait until the kernel has ended and return its exit code."""
        while (code := await self.poll()) is None:
            await asyncio.sleep(0.05)
        process, self._process = self._process, None
        if process is not None:
            process.close()
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group inside."""
        if self._process is not None and signum:
            self._process.signal(signal.Signals(signum))

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its processes at once."""
        if self._process is not None:
            self._process.kill(0)

    async def terminate(self, restart: bool = False) -> None:
        """End the kernel and its processes: TERM, then KILL."""
        if self._process is not None:
            self._process.kill(_GRACE)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Make the sockets' directories and the relay; return what `launch_kernel` gets."""
        manager = self.parent
        if manager is None:
            raise PolicyError(
                "a kernel of Stockade needs a kernel manager",
                hint="start it with jupyter_client.KernelManager",
            )
        kwargs.pop("transport_encryption", None)
        if getattr(manager, "transport_encryption", "disabled") == "required":
            raise PolicyError(
                'transport_encryption = "required" has no effect: the sockets are in your own directory',
                hint='set KernelManager.transport_encryption to "auto" or "disabled"',
            )
        if self._sockets is None:
            self._sockets = SocketDirectory()
            manager.transport, manager.ip = "ipc", f"{self._sockets.clients}/k"
        manager.write_connection_file()
        self.connection_info = info = manager.get_connection_info()
        self._relay = KernelRelay(
            manager.ip,
            f"{self._sockets.kernel}/k",
            {name: info[f"{name}_port"] for name in _PORTS},
            None if self.display == "all" else self.display,
            manager.session.clone().sign,
        )
        words = manager.format_kernel_cmd(extra_arguments=kwargs.pop("extra_arguments", []))
        outside, inside = os.path.realpath(manager.connection_file), f"{self._sockets.kernel}/connection.json"
        with open(inside, "w", encoding="utf-8", opener=_private) as file:
            json.dump(info | {"ip": f"{self._sockets.kernel}/k", "key": info["key"].decode()}, file)
        command = [word.replace(outside, inside) for word in words]
        return await super().pre_launch(cmd=command, **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Open the sandbox, unless a restarted kernel finds it open, and start the kernel in it."""
        directory = os.path.abspath(kwargs.get("cwd") or os.getcwd())
        env = {name: kwargs["env"][name] for name in self.kernel_spec.env if name in kwargs["env"]}
        try:
            await asyncio.to_thread(self._launch, cmd, directory, env)
        except BaseException:
            await self.cleanup()
            raise
        return self.connection_info

    def _launch(self, cmd: list[str], directory: str, env: dict[str, str]) -> None:
        if self._sandbox is None or self._sandbox.ended:
            self._open(cmd[0], directory)
        assert self._sandbox is not None
        rule = self._sandbox.policy.workspace
        in_workspace = rule is not None and f"{directory}/".startswith(f"{os.path.realpath(rule.path)}/")
        self._process = self._sandbox.start(
            cmd, cwd=directory if in_workspace else None, env=env, stderr=_STDOUT, grace=_GRACE
        )
        threading.Thread(target=self._log_output, args=(self._process.stdout,), daemon=True).start()

    def _open(self, program: str, directory: str) -> None:
        assert self._sockets is not None
        before, self._sandbox = self._sandbox, None
        resumed = None
        if before is not None:  # something ended it, such as a limit
            resumed = self._workspace(before)
            before.close()
        policy = chosen_policy(self.policy, directory)
        shown = policy.toolchain
        policy = msgspec.structs.replace(
            policy,
            write=(*policy.write, literal(self._sockets.kernel)),
            toolchain=(*shown, program) if isinstance(shown, tuple) else shown and (program,),
        )
        self._sandbox = Sandbox(
            policy, on_exit=self.on_exit, resume=resumed, name=f"kernel {self.kernel_id}"[:64]
        )
        self._sandbox.open()

    def _workspace(self, sandbox: Sandbox) -> Workspace | None:
        rule = sandbox.policy.workspace
        return sandbox.workspace if rule is not None and rule.mode == "overlay" else None

    def _log_output(self, stream: IO[bytes]) -> None:
        """Log what the kernel prints outside of cells; it chooses the bytes, so they are escaped."""
        with contextlib.suppress(OSError, ValueError):  # the process was closed
            while line := stream.readline(_LONGEST_LINE):
                text = line.decode("utf-8", "replace").rstrip()
                self.log.info("kernel %s: %s", self.kernel_id, ascii(text)[1:-1])

    async def cleanup(self, restart: bool = False) -> None:
        """Close the relay; without `restart` also end the sandbox, and say where its changes are."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if restart:
            return
        sandbox, self._sandbox = self._sandbox, None
        sockets, self._sockets = self._sockets, None
        try:
            if sandbox is not None:
                await asyncio.to_thread(self._close, sandbox)
        finally:
            if sockets is not None:
                sockets.close()

    def _close(self, sandbox: Sandbox) -> None:
        kept = self._workspace(sandbox)
        sandbox.close()
        if kept is not None and os.path.isdir(kept.layer):  # without changes nothing is kept
            self.log.info("kernel %s changed files: stockade diff %s", self.kernel_id, kept.id)


#: `subprocess.STDOUT`, which need not be imported for it.
_STDOUT = -2


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def chosen_policy(given: str | dict[str, Any] | None, directory: str) -> Policy:
    """Return the policy of a kernel.json; without one, `directory` is the workspace."""
    if given is None:
        return Policy(workspace=literal(directory))
    if isinstance(given, str) and not os.path.isabs(os.path.expanduser(given)):
        raise PolicyError(
            f"policy = {given!r}: is relative, and a kernel has no directory that it could begin in",
            hint="write the absolute path of the file in kernel.json",
        )
    return policy_or_default(os.path.expanduser(given) if isinstance(given, str) else given)


class SocketDirectory:
    """A directory with a short name for the sockets of one kernel: `kernel` it sees, `clients` it does not.

    It is removed by `close`. If this process is killed, the next kernel of the same user removes it.
    """

    def __init__(self) -> None:
        parent = _short_parent()
        _sweep(parent)
        self.path, self._lock = _locked_directory(parent)
        self.kernel, self.clients = f"{self.path}/k", f"{self.path}/c"
        os.mkdir(self.kernel, 0o700)
        os.mkdir(self.clients, 0o700)

    def close(self) -> None:
        """Remove it, whatever the kernel left in it."""
        _remove(self.path)
        os.close(self._lock)


def _locked_directory(parent: str) -> tuple[str, int]:
    """Make a directory and lock it; a sweep of another process may remove it before it is locked."""
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, dirwalk.DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _remove(path: str) -> None:
    parent = os.open(os.path.dirname(path), dirwalk.DIRECTORY)
    try:
        dirwalk.remove(parent, os.path.basename(path))
    finally:
        os.close(parent)


def _short_parent() -> str:
    """Return a directory for temporary files whose name leaves room for the names of sockets."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        short = len(os.fsencode(parent)) < _LONGEST_DIRECTORY - len(_PREFIX) - 10
        if os.path.isabs(parent) and short and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise PolicyError(
        "no directory for sockets is writable", hint="set TMPDIR to a directory with a short name"
    )


def _sweep(parent: str) -> None:
    """Remove the directories of processes of this user that were killed: their lock is free."""
    for entry in list(os.scandir(parent)):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            held = os.open(entry.path, dirwalk.DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(entry.path)
            finally:
                os.close(held)


def install(arguments: Sequence[str]) -> str:
    """Register a Python kernel that runs in sandboxes; return the directory of its kernel.json."""
    from jupyter_client.kernelspec import KernelSpecManager

    args = _parser().parse_args(arguments)
    config: dict[str, Any] = {
        "display": "all" if args.display == ["all"] else args.display or list(PLAIN_TYPES)
    }
    if args.policy:
        config["policy"] = os.path.abspath(args.policy)
        policy_or_default(config["policy"])
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": args.display_name,
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": NAME, "config": config}},
    }
    with tempfile.TemporaryDirectory() as made:
        with open(f"{made}/kernel.json", "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)
        prefix = sys.prefix if args.sys_prefix else args.prefix
        placed: str = KernelSpecManager().install_kernel_spec(
            made, kernel_name=args.name, user=args.user, prefix=prefix
        )
        return placed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stockade.integrations.jupyter",
        description="Register a Python kernel that runs behind walls the kernel of the system keeps.",
        epilog="example: python -m stockade.integrations.jupyter install --user",
    )
    parser.add_argument("command", metavar="install", choices=["install"], help="write the kernel's files")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for you alone")
    place.add_argument("--sys-prefix", action="store_true", help="in this virtual environment")
    place.add_argument("--prefix", metavar="DIR", help="below this directory")
    parser.add_argument(
        "--name", default="stockade", help="its name for `jupyter --kernel` (default: stockade)"
    )
    parser.add_argument(
        "--display-name", metavar="TEXT", default="Python 3 (sandboxed)", help="its name in menus"
    )
    parser.add_argument("--policy", metavar="FILE", help="the policy file of its sandboxes")
    parser.add_argument(
        "--display",
        metavar="TYPE",
        action="append",
        help='a display type that reaches the page; "all" lets HTML, JavaScript and widgets pass',
    )
    return parser


def main(arguments: Sequence[str]) -> str:
    """Install the kernel, and return what to say about it; an error ends the process with its text."""
    try:
        return f"installed in {install(arguments)}"
    except PermissionError as error:
        sys.exit(f"stockade: error: {error}\nstockade: hint: --user installs for you alone")
    except StockadeError as error:
        sys.exit(f"stockade: error: {error.message}\nstockade: hint: {error.hint}")


if __name__ == "__main__":
    print(main(sys.argv[1:]))
