"""The values of a sandbox's secrets: from their sources to its egress process, and nowhere else.

The supervisor reads each value into locked memory, sends it from there over the control socket, and wipes the
memory. A variable of the environment is in the supervisor's memory anyway, where it stays. No error here has
a value, or anything that a command has printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets as random
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from stockade.egress.redaction import LEAST_VALUE
from stockade.egress.secrets import MOST_VALUE, MOST_VALUES, describe
from stockade.errors import SetupError
from stockade.linux import os_errors
from stockade.linux.secure_buffer import SecureBuffer
from stockade.linux.user import Caller
from stockade.policy.model import Policy, Secret
from stockade.policy.secrets import host_of
from stockade.policy.values import expand
from stockade.runs.io.eventloop import Events, Steps

#: How long a command may take to print a value.
COMMAND_SECONDS = 30.0
#: After the prefix: a word that people recognise, and 112 random bits.
MARK, RANDOM_BYTES = "stockade", 14


class SecretValues(NamedTuple):
    """Values in locked memory, and what a control message says about them."""

    described: list[dict[str, object]]
    memory: SecureBuffer
    size: int

    @property
    def view(self) -> memoryview:
        """All values, one after another."""
        return self.memory.view[: self.size]

    def observe(self, pid: int) -> None:
        """Check that the egress process has locked its memory for values, and that it can leave no core."""
        with os_errors.setup_errors():
            locked = _number(f"/proc/{pid}/status", b"VmLck:")
            core = _number(f"/proc/{pid}/limits", b"Max core file size")
        if locked * 1024 < self.size:
            raise _unprotected("the egress process has not locked the memory of its secrets")
        if core != 0:
            raise _unprotected("the egress process could leave its secrets in a core file")


class SecretSources:
    """The secrets of one sandbox: what programs have instead of them, and where their values are read."""

    def __init__(self, policy: Policy, placeholders: Mapping[str, str], caller: Caller) -> None:
        self.policy, self.placeholders, self._caller = policy, placeholders, caller
        #: How often all values were read again.
        self.refreshed = 0

    def read(self, events: Events) -> Steps[SecretValues]:
        """Read the values from their sources. The caller closes the memory."""
        return (yield from read_values(self.policy, self.placeholders, self._caller, events))


def make_placeholders(policy: Policy, caller: Caller) -> dict[str, str]:
    """Return a placeholder for each secret: its prefix, a word and random digits, letters and digits only.

    A secret whose source ends in `?` and is not there has none, and no program gets its value.
    """
    if not policy.net:
        return {}
    return {
        name: f"{secret.prefix}{MARK}{random.token_hex(RANDOM_BYTES)}"
        for name, secret in policy.secrets.items()
        if not _is_left_out(name, secret, caller)
    }


def _is_left_out(name: str, secret: Secret, caller: Caller) -> bool:
    if (secret.from_env or "").endswith("?"):
        return not caller.environ.get((secret.from_env or "")[:-1])
    if (secret.from_file or "").endswith("?"):
        return not os.path.lexists(_full_path(name, (secret.from_file or "")[:-1], caller))
    return False


def _full_path(name: str, path: str, caller: Caller) -> str:
    return expand(path, f"secrets.{name}.from_file", home=caller.home, cwd=caller.cwd, environ=caller.environ)


def read_values(
    policy: Policy, placeholders: Mapping[str, str], caller: Caller, events: Events
) -> Steps[SecretValues]:
    """Read the value of each secret from its source. The caller closes the memory."""
    memory = SecureBuffer(MOST_VALUES)
    described, at = [], 0
    try:
        for name, placeholder in placeholders.items():
            secret = policy.secrets[name]
            size = yield from _read(name, secret, memory.view[at : at + MOST_VALUE + 2], caller, events)
            hosts = [tuple(host_of(text)) for text in secret.hosts]
            described.append(describe(name, placeholder, hosts, secret.as_, size))  # type: ignore[arg-type]
            at += size
            if at > MOST_VALUES - MOST_VALUE:
                problem = f"all values together are longer than {MOST_VALUES - MOST_VALUE} bytes"
                raise _failure(name, problem, "use several sandboxes")
    except BaseException:
        memory.close()
        raise
    return SecretValues(described, memory, at)


def _read(name: str, secret: Secret, room: memoryview, caller: Caller, events: Events) -> Steps[int]:
    if secret.from_env is not None:
        size = _from_environment(name, secret.from_env.removesuffix("?"), room, caller)
    elif secret.from_file is not None:
        size = _from_file(name, secret.from_file.removesuffix("?"), room, caller)
    else:
        assert secret.from_command is not None
        size = yield from _from_command(name, secret.from_command, room, caller, events)
    where = getattr(secret, secret.source)
    shown = where if isinstance(where, str) else where[0]
    for ending in (10, 13):
        if secret.source != "from_env" and size and size <= len(room) and room[size - 1] == ending:
            size -= 1
    if size > MOST_VALUE:
        raise _failure(name, f"the value of {shown} is longer than {MOST_VALUE} bytes", "name another source")
    if size < LEAST_VALUE:
        problem = f"the value of {shown} is empty" if not size else f"the value of {shown} has {size} bytes"
        hint = f"a value has at least {LEAST_VALUE} bytes, so that Stockade can find it in answers"
        raise _failure(name, problem, hint)
    if any(byte < 32 or byte == 127 for byte in room[:size]):
        problem = f"the value of {shown} has control characters or several lines"
        raise _failure(name, problem, "no header can have that; name a source that has one line")
    return size


def _from_environment(name: str, variable: str, room: memoryview, caller: Caller) -> int:
    value = caller.environ.get(variable)
    if value is None:
        raise _failure(name, f"your environment has no variable {variable}", f"set it: export {variable}=...")
    data = os.fsencode(value)
    room[: min(len(data), len(room))] = data[: len(room)]
    return len(data)


def _from_file(name: str, path: str, room: memoryview, caller: Caller) -> int:
    full = _full_path(name, path, caller)
    try:
        # A pipe would block, and a device could have effects.
        file = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _failure(name, f"{full} is not a regular file", "name a file that has the value")
            size = 0
            while size < len(room) and (more := os.readv(file, [room[size:]])):
                size += more
            return size
        finally:
            os.close(file)
    except OSError as error:
        raise _failure(name, f"cannot read {full}: {error.strerror}", "check the path") from None


def _from_command(
    name: str, command: tuple[str, ...], room: memoryview, caller: Caller, events: Events
) -> Steps[int]:
    """Run the command as the user, without a terminal, and read what it prints.

    It runs where no program can write: many commands find modules or settings in their directory.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL,
                env=dict(caller.environ), cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            problem = f"cannot run {command[0]}: {error.strerror}"
            raise _failure(name, problem, "check the command's name") from None
        finally:
            os.close(writer)
        try:
            size = yield from _read_output(name, command, reader, room, process, events)
            return size
        finally:
            # Also its children: a value that nobody reads any more should not be made.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        os.close(reader)


def _read_output(
    name: str,
    command: tuple[str, ...],
    reader: int,
    room: memoryview,
    process: subprocess.Popen[bytes],
    events: Events,
) -> Steps[int]:
    late = time.monotonic() + COMMAND_SECONDS
    os.set_blocking(reader, False)
    size = 0
    events.watch(reader)
    try:
        while size < len(room):
            yield max(0.0, late - time.monotonic())
            if time.monotonic() >= late:
                problem = f"{command[0]} did not print a value within {COMMAND_SECONDS:g} s"
                raise _failure(name, problem, "it has no terminal: unlock what it asks before the run")
            with contextlib.suppress(BlockingIOError):
                if not (more := os.readv(reader, [room[size:]])):
                    break
                size += more
    finally:
        events.forget(reader)
    while process.poll() is None and size < len(room) and time.monotonic() < late:
        yield 0.005
    if process.returncode:
        problem = f"{command[0]} ended with exit code {process.returncode}"
        raise _failure(name, problem, "run it by itself to see what it says")
    return size


def _number(path: str, name: bytes) -> int:
    """Return the first number on a line of a file in /proc; -1 if there is none."""
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(name):
                word = line[len(name) :].split()[0]
                return int(word) if word.isdigit() else -1
    return -1


def _unprotected(what: str) -> SetupError:
    return SetupError(
        f"nothing was run: {what}",
        stage="evidence",
        hint="this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`",
    )


def _failure(name: str, problem: str, hint: str) -> SetupError:
    return SetupError(f"secrets.{name}: {problem}", stage="secrets", errno=errno.EINVAL, hint=hint)
