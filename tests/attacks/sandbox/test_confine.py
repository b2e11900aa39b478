"""`confine`: what a process that has confined itself can no longer do, and what it is refused.

Each test is a process of its own, because there is no way back.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stockade.host import host
from support import gatebuild
from support.means import need

need(host().has("scopes"), "this kernel's Landlock cannot keep signals inside")

ACCEPT = ("files", "processes", "environment", "devices", "terminal", "cleanup", "limits.output")
BEGIN = f"""
import ctypes, errno, fcntl, json, mmap, os, socket, subprocess, sys, tempfile, threading, time
import stockade
from stockade import Policy, PolicyError, SetupError, UnsupportedError

given = json.loads(sys.argv[1])
ACCEPT = {ACCEPT!r}

def tried(call, *words):
    try:
        call(*words)
    except OSError as error:
        return errno.errorcode[error.errno]
    except stockade.StockadeError as error:
        return f"{{type(error).__name__}}: {{error}} | {{error.hint}}"
    return "ok"

def say(value):
    print(json.dumps(value))
"""
DENIED = {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT"}


def python(body: str, *, pass_fds: Sequence[int] = (), **given: Any) -> Any:
    """What a Python that runs the body says."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + body, json.dumps(given)],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ATTACK = """
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "unshare": 272, "keyctl": 250, "io_uring": 425},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "unshare": 97, "keyctl": 219, "io_uring": 425},
}[os.uname().machine]

def call(name, *words):
    if libc.syscall(NUMBERS[name], *words) < 0:
        raise OSError(ctypes.get_errno(), name)

def connected(family, address):
    with socket.socket(family) as end:
        end.connect(address)

def in_thread(call, *words):
    found = []
    thread = threading.Thread(target=lambda: found.append(tried(call, *words)))
    thread.start()
    thread.join()
    return found[0]

def seized(pid):
    call("ptrace", 0x4206, pid, 0, 0)  # PTRACE_SEIZE
    call("ptrace", 17, pid, 0, 0)

def started(*words):
    if subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        raise OSError(errno.EACCES, "it was refused")

page = ctypes.create_string_buffer(120)
secret, pid = given["secret"], given["pid"]
root = os.open("/", os.O_RDONLY)
if given["confined"]:
    stockade.confine(Policy(read=[given["granted"]], accept=ACCEPT), keep=[root])
say({
    "read": tried(open, secret),
    "read-by-a-directory": tried(lambda: os.open(secret[1:], os.O_RDONLY, dir_fd=root)),
    "read-in-a-thread": in_thread(open, secret),
    "read-in-a-program": tried(started, "cat", secret),
    "list": tried(os.listdir, os.path.dirname(secret)),
    "write": tried(open, secret, "a"),
    "write-what-is-read-only": tried(open, given["granted"] + "/file", "a"),
    "make": tried(os.mkdir, secret + "-2"),
    "remove": tried(os.unlink, given["spare"]),
    "tcp": tried(connected, socket.AF_INET, ("127.0.0.1", given["port"])),
    "unix": tried(connected, socket.AF_UNIX, given["unix"]),
    "abstract": tried(connected, socket.AF_UNIX, "\\0" + given["abstract"]),
    "signal": tried(os.kill, pid, 0),
    "seize": tried(seized, pid),
    "words-of-another": tried(open, f"/proc/{pid}/environ"),
    "unshare": tried(call, "unshare", 0x10000000),
    "keyring": tried(call, "keyctl", 0, -3, 0, 0, 0),
    "ring": tried(call, "io_uring", 1, page),
})
"""


def test_what_a_confined_process_tries_is_refused(granted: Path, hidden: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=9) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(["sleep", "300"]) as other,
    ):
        unix.bind(str(hidden / "s"))
        abstract.bind(f"\0stockade-test-{os.getpid()}")
        for end in (unix, abstract):
            end.listen(9)
        found = {}
        for confined in (False, True):
            (hidden / "spare").touch()
            found[confined] = python(
                ATTACK,
                confined=confined,
                granted=str(granted),
                secret=str(hidden / "secret"),
                spare=str(hidden / "spare"),
                pid=other.pid,
                port=tcp.getsockname()[1],
                unix=str(hidden / "s"),
                abstract=f"stockade-test-{os.getpid()}",
            )
            (hidden / "secret-2").rmdir() if not confined else None
        other.kill()
    refused = {name for name, said in found[False].items() if said != "ok"}
    assert refused <= {"unshare", "keyring", "ring", "seize"}  # some hosts refuse these to everybody
    assert set(found[True].values()) <= DENIED, found[True]
    assert (hidden / "secret").read_text() == "the secret\n" and (hidden / "spare").exists()


WORK = """
policy = Policy(read=[given["data"]], write=[given["out"]], limits={"files": 99}, accept=ACCEPT)
done = stockade.confine(policy)
with open(given["out"] + "/new", "w") as file:
    file.write(open(given["data"] + "/file").read())
    file.flush()
copying = ["sh", "-c", f"cat {given['out']}/new >{given['out']}/two"]
thread = threading.Thread(target=subprocess.run, args=(copying,))
thread.start()
thread.join()
import wave  # what the interpreter has is there
say({
    "files": subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True).stdout,
    "weaker": [name for name, control in done.controls.items() if not control.grade.enforced],
    "grades": sorted({control.grade for control in done.controls.values() if control.grade.enforced}),
    "seen": [done.evidence.no_new_privs, done.evidence.seccomp, done.evidence.rlimits["files"]],
    "descriptors": [one.number for one in done.descriptors if not one.leads_to.startswith("/proc/")],
})
"""


def test_what_is_granted_works_and_what_was_seen_is_told(granted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    said = python(WORK, data=str(granted), out=str(out))
    assert (out / "two").read_text() == "original\n"
    assert said["files"] == "99\n"
    assert set(said["weaker"]) == {*ACCEPT, "limits.tasks"}
    assert said["grades"] == ["confirmed by the gate before untrusted code"]
    assert said["seen"] == [True, 2, 99] and said["descriptors"] == [0, 1, 2]


REFUSED = """
def confine(**clauses):
    stockade.confine(Policy(**{"accept": ACCEPT} | clauses))

def beside_a_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        confine()
    finally:
        stop.set()
        thread.join()

def beside_a_child():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        confine()

libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)

def cloned(flags):
    # A process that waits in the memory of this one.
    top = ctypes.addressof(stack) + len(stack) & ~15
    return libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top), flags, None)

def beside_a_child_that_tells_of_nothing():
    child = cloned(CLONE_VM := 0x100)
    try:
        confine()
    finally:
        os.kill(child, 9)
        os.waitpid(child, WALL := 0x40000000)

def beside_a_sibling_with_its_memory():
    middle = os.fork()
    if middle == 0:
        sibling = cloned(0x100 | (CLONE_PARENT := 0x8000))
        said = tried(confine)
        os.kill(sibling, 9)
        os._exit("shares its memory" not in said)
    found = os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])
    os.waitpid(-1, 0)
    return found

def when_its_time_is_spent():
    while time.process_time() < 1:
        pass
    confine(limits={"cpu_time": "1s"}, accept=[*ACCEPT, "limits.cpu_time"])

def beside_the_gate_of_its_sandboxes():
    stockade.run(["true"]).check()
    try:
        confine()
    finally:
        from stockade.gate import client
        client.shutdown()

def beside_shared_memory():
    with tempfile.TemporaryFile(dir=given["data"]) as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
        kept = [number for number in range(3, 20) if tried(os.fstat, number) == "ok"]
        try:
            stockade.confine(Policy(accept=ACCEPT), keep=kept)
        finally:
            shared.close()

def beside_a_descriptor():
    with open(given["data"] + "/file"):
        confine()

say({
    "nothing accepted": tried(lambda: stockade.confine(Policy())),
    "overlay": tried(lambda: confine(workspace=given["data"])),
    "protect": tried(lambda: confine(workspace={"path": given["data"], "mode": "rw"})),
    "deny": tried(lambda: confine(read=[given["data"]], deny=[given["data"] + "/file"])),
    "exec": tried(lambda: confine(exec=["/usr/bin/*"])),
    "wall": tried(lambda: confine(limits={"wall": 9})),
    "tasks": tried(lambda: confine(limits={"tasks": 9})),
    "cpu": tried(lambda: confine(limits={"cpu": 1})),
    "disk": tried(lambda: confine(limits={"disk": "1M"})),
    "memory": tried(lambda: confine(limits={"memory": "2M"}, accept=[*ACCEPT, "limits.memory"])),
    "env": tried(lambda: confine(env={"A": "b"})),
    "pass_env": tried(lambda: confine(pass_env=["LANG"])),
    "backend": tried(lambda: confine(backend="landlock")),
    "no policy": tried(lambda: stockade.confine(None)),
    "thread": tried(beside_a_thread),
    "child": tried(beside_a_child),
    "silent child": tried(beside_a_child_that_tells_of_nothing),
    "sibling": beside_a_sibling_with_its_memory(),
    "shared memory": tried(beside_shared_memory),
    "descriptor": tried(beside_a_descriptor),
    "cpu_time": tried(when_its_time_is_spent),
    "gate": tried(beside_the_gate_of_its_sandboxes),
    "afterwards": tried(open, given["secret"]),
})
"""


def test_what_cannot_be_done_to_a_living_process_is_refused_and_nothing_is_changed(
    granted: Path, hidden: Path
) -> None:
    said = python(REFUSED, data=str(granted), secret=str(hidden / "secret"))
    assert said.pop("afterwards") == "ok"
    assert said.pop("sibling") == 0
    assert set(said["nothing accepted"].split("accept = ")[1].split('"')[1::2]) == set(ACCEPT)
    expected = {
        "nothing accepted": ("UnsupportedError", "waive it in the policy"),
        "overlay": ("UnsupportedError", "workspace.overlay"),
        "protect": ("UnsupportedError", "protect"),
        "deny": ("UnsupportedError", "deny"),
        "exec": ("UnsupportedError", "exec"),
        "wall": ("UnsupportedError", "limits.wall"),
        "tasks": ("UnsupportedError", "limits.tasks"),
        "cpu": ("UnsupportedError", "limits.cpu"),
        "disk": ("UnsupportedError", "limits.disk"),
        "memory": ("PolicyError", "of address space"),
        "env": ("PolicyError", "os.environ"),
        "pass_env": ("PolicyError", "os.environ"),
        "backend": ("PolicyError", "run the work in a Sandbox"),
        "no policy": ("PolicyError", "is not a policy"),
        "thread": ("UnsupportedError", "several threads"),
        "child": ("UnsupportedError", "children"),
        "silent child": ("UnsupportedError", "children"),
        "cpu_time": ("PolicyError", "already used"),
        "gate": ("UnsupportedError", "a Sandbox"),
        "shared memory": ("UnsupportedError", "shared memory"),
        "descriptor": ("UnsupportedError", "granted/file)"),
    }
    for name, (kind, words) in expected.items():
        assert said[name].startswith(kind) and words in said[name], (name, said[name])


AGAIN = """
limits, filters = {"files": 50}, {"allow": ["seccomp"]}
wide = Policy(read=[given["data"], given["more"]], syscalls=filters, limits=limits, accept=ACCEPT)
narrow = Policy(read=[given["data"]], syscalls=filters | {"deny": ["getsid"]}, limits=limits, accept=ACCEPT)
os.dup2(0, 60)  # past what the limit lets it open
stockade.confine(wide, keep=[60])
past = tried(stockade.confine, narrow)
os.close(60)
first = tried(os.listdir, given["more"])
child = os.fork()
if child == 0:
    os._exit("forked" not in tried(stockade.confine, narrow))
forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
wider = tried(stockade.confine, Policy(read=[given["data"], "/opt"], limits=limits, accept=ACCEPT))
with open(given["more"] + "/secret"):
    opened = tried(stockade.confine, narrow)
done = stockade.confine(narrow)
say([first, forked, wider, opened, tried(os.listdir, given["more"]), tried(os.listdir, given["data"]),
     tried(os.getsid, 0), done.evidence.filters, past])
"""


def test_a_second_time_it_can_only_be_narrower(granted: Path, hidden: Path) -> None:
    said = python(AGAIN, data=str(granted), more=str(hidden))
    first, forked, wider, opened, more, data, call, filters, past = said
    assert past.startswith("UnsupportedError") and ": 60 (" in past
    assert (first, forked) == ("ok", 0)
    assert wider.startswith("PolicyError") and "cannot be removed" in wider and "/opt" in wider
    assert opened.startswith("UnsupportedError") and "hidden/secret" in opened
    assert (more, data, call) == ("EACCES", "ok", "EPERM") and filters >= 2


ONCE = """
policy = Policy(read=[given["data"]], accept=ACCEPT)
stockade.confine(policy)
try:
    stockade.confine(policy)
except stockade.SetupError as error:
    say([error.message, error.hint, tried(os.listdir, given["data"])])
"""


def test_a_second_time_the_first_policy_must_have_allowed_filters(granted: Path) -> None:
    message, hint, data = python(ONCE, data=str(granted))
    assert "forbids loading a filter" in message and "nothing was changed" in message
    assert 'syscalls.allow = ["seccomp"]' in hint and data == "ok"


SABOTAGE = """
from stockade import gate
from stockade.backends.confinement import ConfinementBackend
from stockade.sandbox import confine as module

gate.library = lambda: given["library"]
policy = Policy(read=[given["data"]], accept=ACCEPT)
plans = []
plan = ConfinementBackend.plan
ConfinementBackend.plan = classmethod(lambda cls, given: plans.append(plan(given)) or plans[-1])

def one(order):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        ordered = ctypes.c_char_p.in_dll(ctypes.CDLL(given["library"]), "sabotage_order")
        ordered.value = order.encode()
        said = tried(lambda: stockade.confine(policy, keep=[writer]))
        kinds = [op.kind for op in plans[0].ops]
        again = tried(lambda: stockade.confine(policy, keep=[writer])) if "must end" in said else ""
        os.write(writer, json.dumps([kinds, said, tried(open, given["secret"]), again]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)

stockade.Host.current()
import pyseccomp
whole = one("op:9999")
kinds = whole.pop(0)
orders = ["scopes", "filter", *(f"op:{kinds.index(kind)}" for kind in set(kinds[1:]))]
say({"whole": whole} | {order: one(order)[1:] for order in orders})
"""


@pytest.mark.timeout(120)
def test_a_wall_that_was_left_out_is_noticed_before_anything_is_changed(
    granted: Path, hidden: Path, tmp_path: Path
) -> None:
    library = gatebuild.sabotaged_library(tmp_path)
    said = python(SABOTAGE, library=str(library), data=str(granted), secret=str(hidden / "secret"))
    assert said.pop("whole") == ["ok", "EACCES", ""]
    # The filter's bytes are compared when it is there: from then on the process is behind walls.
    text, secret, again = said.pop("filter")
    assert "filter" in text and "is only partly confined and must end" in text and secret == "EACCES"
    assert "an earlier call of confine failed halfway" in again and "must end" in again
    for order, (text, secret, _) in said.items():
        assert text.startswith("SetupError") and "nothing was changed" in text, (order, text)
        assert secret == "ok"
    assert len(said) == 6  # scopes, and an operation of each kind
