"""System calls that lead out of a sandbox, or deep into the kernel, are refused by their raw numbers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pyseccomp
import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy
from support.means import applies, need

#: Newer than the tables of some libseccomp; the same number on every architecture.
NEW_CALLS = {"statmount": 457, "listmount": 458, "open_tree_attr": 467}
HERE = -100  # AT_FDCWD
REFUSED = ("EPERM", "ENOSYS")

NEW_NAMESPACE = {
    "time": 0x80,
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
SIGCHLD = 17


class Call(NamedTuple):
    """One system call, and whom the control needs: "user", "root", or the owner of new namespaces."""

    name: str
    arguments: tuple[Any, ...]
    control: str = "user"
    forks: bool = False

    @property
    def number(self) -> int:
        found = NEW_CALLS.get(self.name, pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, self.name))
        need(found >= 0, f"{os.uname().machine} has no system call {self.name}")
        return int(found)

    def words(self) -> list[Any]:
        return [self.number, json.dumps(self.arguments), *(["forks"] if self.forks else [])]


def memory(*parts: bytes) -> dict[str, str]:
    return {"bytes": b"".join(parts).hex()}


def quads(*numbers: int) -> dict[str, str]:
    return memory(struct.pack(f"={len(numbers)}Q", *numbers))


OWNER = "user mnt"
MOUNTS = [
    Call("mount", ("tmpfs", "/tmp", "tmpfs", 0, 0), OWNER),
    Call("mount", (0, "/", 0, 0x1000 | 0x20, 0), OWNER),  # remount, bind
    Call("umount2", ("/proc", 2), "user mnt pid"),
    Call("pivot_root", (".", "."), OWNER),
    Call("chroot", ("/tmp",), OWNER),
    Call("open_tree", (HERE, "/tmp", 1), OWNER),
    Call("open_tree_attr", (HERE, "/tmp", 1, quads(0, 0, 0, 0), 32), OWNER),
    Call("move_mount", (HERE, "/tmp", HERE, "/tmp", 0), OWNER),
    Call("fsopen", ("tmpfs", 0), OWNER),
    Call("fsconfig", (-1, 0, "source", 0, 0), OWNER),
    Call("fsmount", (-1, 0, 0), OWNER),
    Call("fspick", (HERE, "/tmp", 0), OWNER),
    Call("mount_setattr", (HERE, "/proc", 0, quads(0, 0, 0, 0), 32), OWNER),
    Call("statmount", (quads(24, 1, 2), memory(bytes(512)), 512, 0), OWNER),
    Call("listmount", (quads(24, 0xFFFFFFFFFFFFFFFF, 0), memory(bytes(512)), 64, 0), OWNER),
]
KERNEL = [
    Call("io_uring_setup", (8, memory(bytes(120)))),
    Call("io_uring_enter", (-1, 0, 0, 0, 0, 0)),
    Call("io_uring_register", (-1, 0, 0, 0)),
    Call("userfaultfd", (1,)),
    Call("bpf", (9999, memory(bytes(128)), 128)),
    Call("bpf", (0, memory(struct.pack("=4I", 2, 4, 4, 1), bytes(112)), 128), "root"),
    Call(
        "perf_event_open", (memory(struct.pack("=IIQQQQQ", 1, 64, 1, 0, 0, 0, 0x60), bytes(16)), 0, -1, -1, 0)
    ),
    Call("kexec_load", (0, 0, 0, 0), "root"),
    Call("kexec_file_load", (-1, -1, 0, "", 0), "root"),
    Call("init_module", (0, 0, ""), "root"),
    Call("finit_module", (-1, "", 0), "root"),
    Call("delete_module", ("no_such_module", 0), "root"),
    Call("personality", (0x0040000,)),  # ADDR_NO_RANDOMIZE
    Call("personality", (0x0400000,)),  # READ_IMPLIES_EXEC
    Call("personality", (0x100000000 | 0x0040000,)),
    Call("name_to_handle_at", (HERE, "/", memory(struct.pack("=Ii", 64, 0), bytes(64)), memory(bytes(8)), 0)),
    Call("open_by_handle_at", (-1, memory(struct.pack("=Ii", 8, 1), bytes(8)), 0)),
    Call("fanotify_init", (0x200, 0)),
    Call("modify_ldt", (0, memory(bytes(16)), 16)),
    Call("iopl", (3,), "root"),
    Call("ioperm", (0x80, 1, 1), "root"),
    Call("syslog", (10, 0, 0), "root"),
    Call("acct", ("/nonexistent/file",), "root"),
    Call("swapon", ("/nonexistent/file", 0), "root"),
    Call("swapoff", ("/nonexistent/file",), "root"),
    Call("quotactl", (0, "/nonexistent/file", 0, 0)),
    Call("settimeofday", (0, 0), "root"),
    Call("reboot", (0, 0, 0, 0), "root"),  # wrong magic numbers: the kernel would answer EINVAL
    Call("sethostname", ("x", -1), "user uts"),
    Call("setdomainname", ("x", -1), "user uts"),
    Call("lookup_dcookie", (0, 0, 0), "root"),
    Call("mbind", (0, 0, 0, 0, 0, 0)),
    Call("migrate_pages", (0, 0, 0, 0)),
]
KEYS = [
    Call("add_key", ("user", "stockade-test", "x", 1, -1)),  # in the thread's own keyring, gone with it
    Call("request_key", ("user", "stockade-test", 0, 0)),
    Call("keyctl", (0, -3, 0)),  # the id of the session keyring
    Call("keyctl", (0, -4, 0)),  # of the user's
    Call("keyctl", (1, 0)),  # join a session keyring
]
NAMESPACES = [
    *(Call("unshare", (flag,), "user" if name == "user" else OWNER) for name, flag in NEW_NAMESPACE.items()),
    *(
        Call("clone", (high | flag | SIGCHLD, 0, 0, 0, 0), "user" if name == "user" else OWNER, forks=True)
        for name, flag in NEW_NAMESPACE.items()
        if name != "time"  # for clone these bits are the exit signal
        for high in (0, 1 << 40)
    ),
    *(
        Call(
            "clone3",
            (quads(flag, 0, 0, 0, SIGCHLD, 0, 0, 0), 64),
            "user" if name == "user" else OWNER,
            forks=True,
        )
        for name, flag in NEW_NAMESPACE.items()
    ),
]


def told(call: Call) -> str:
    return f"{call.name}-{'-'.join(hex(a) if isinstance(a, int) else 'p' for a in call.arguments[:2])}"


def check(call: Call, **policy: Any) -> None:
    assert inside("call", *call.words(), **policy) in REFUSED
    applies(call.control != "root" or arena.IS_ROOT, "refused inside; the control needs root")
    namespaces = "" if call.control in ("user", "root") else call.control
    answer = outside("call", *call.words(), namespaces=namespaces)
    applies(answer != "ENOSYS", f"refused inside; this kernel has no {call.name} to show outside")
    assert answer not in REFUSED, f"the control shows nothing: {answer}"


@pytest.mark.parametrize("call", MOUNTS, ids=told)
def test_mounts_cannot_be_made_or_changed(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("call", KERNEL, ids=told)
def test_a_call_that_reaches_deep_into_the_kernel_is_refused(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("call", KEYS, ids=told)
def test_the_hosts_keys_are_out_of_reach(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("call", NAMESPACES, ids=told)
def test_a_namespace_cannot_be_made(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("name", ["clone", "clone3"])
def test_no_policy_allows_a_nested_user_namespace(name: str) -> None:
    """Either the policy is refused, or what it allows does not include new namespaces."""
    from stockade import PolicyError

    call = next(c for c in NAMESPACES if c.name == name and c.control == "user")
    try:
        answer = inside("call", *call.words(), syscalls={"allow": [name]})
    except PolicyError as refusal:
        assert name in refusal.message
    else:
        assert answer in REFUSED
    assert outside("call", *call.words()) == "ok"


@pytest.mark.parametrize(
    "name", ["mount", "ptrace", "bpf", "io_uring_setup", "keyctl", "unshare", "setns", "open_by_handle_at"]
)
def test_a_call_refused_on_principle_cannot_be_allowed(name: str) -> None:
    from stockade import PolicyError

    with pytest.raises(PolicyError, match=name):
        inside("call", 0, "[]", syscalls={"allow": [name]})


def test_a_denied_call_is_refused_on_top_of_the_built_in_ones() -> None:
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "getpriority")
    denying = {"deny": ["getpriority"]}
    assert inside("call", number, "[0, 0]", syscalls=denying) == "EPERM"
    assert inside("call", *KERNEL[0].words(), syscalls=denying) in REFUSED
    assert outside("call", number, "[0, 0]") == "ok"


LEASE = """
import fcntl, sys
with open(sys.argv[1]) as file:
    for command in (fcntl.F_SETLEASE, fcntl.F_NOTIFY):
        try:
            fcntl.fcntl(file, command, fcntl.F_RDLCK if command == fcntl.F_SETLEASE else 1)
            print("taken")
        except OSError as error:
            print(error.strerror)
"""


def test_no_lease_holds_up_whoever_opens_a_file_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    command = ["/usr/bin/python3", "-c", LEASE, str(file)]
    free = subprocess.run(command, capture_output=True, text=True, check=True)
    assert free.stdout.splitlines()[0] == "taken", "the control shows nothing"
    walled = stockade.run(command, Policy(read=[str(file)]))
    assert walled.text == "Operation not permitted\n" * 2
