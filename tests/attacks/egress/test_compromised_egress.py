"""An egress process that has been taken over: its code is hostile, and its walls are all that is left.

The same attempts are made by an ordinary process outside, where they succeed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from stockade.backends.egress_plan import PORTS_ABI
from stockade.host import host
from support.egress import ANSWERING, CONFINED, ask, running
from support.means import applies

#: Each attempt gives "ok", or the name of the error. It uses only what a copy has loaded.
ATTEMPTS = """
import _thread, ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p

def call(name, *arguments):
    if getattr(libc, name)(*arguments) in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "")

def dial(port, flags=0, protocol=0):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as caller:
        if flags:
            caller.sendto(b"x", flags, ("127.0.0.1", port))
        else:
            caller.connect(("127.0.0.1", port))

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def thread():
    _thread.start_new_thread(lambda: None, ())

def made(*kind):
    socket.socket(*kind).close()

def bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

def attempts(given):
    return {
        "dial a granted port": lambda: dial(given["granted"]),
        "dial another port": lambda: dial(given["other"]),
        "dial another port by its first message": lambda: dial(given["other"], flags=0x20000000),
        "open a file": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
        "open a file for writing": lambda: os.close(os.open("/dev/null", os.O_WRONLY)),
        "look at the root": lambda: os.listdir("/"),
        "look at processes": lambda: os.listdir("/proc"),
        "look at a file": lambda: os.stat("/etc/passwd"),
        "make a file in memory": lambda: os.close(os.memfd_create("x")),
        "execute": lambda: os.execv("/nowhere", ["nowhere"]),
        "fork": fork,
        "start a thread": thread,
        "make a UDP socket": lambda: made(socket.AF_INET, socket.SOCK_DGRAM),
        "make a unix socket": lambda: made(socket.AF_UNIX, socket.SOCK_STREAM),
        "make a netlink socket": lambda: made(socket.AF_NETLINK, socket.SOCK_RAW),
        "listen": bound,
        "signal the supervisor": lambda: os.kill(given["supervisor"], 0),
        "get hold of the supervisor": lambda: os.close(os.pidfd_open(given["supervisor"])),
        "be traced": lambda: call("ptrace", 0, 0, 0, 0),
        "map executable memory": lambda: call(
            "mmap", None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0)
        ),
        "change its name": lambda: call("prctl", 15, b"x", 0, 0, 0),
    }

def answer(given):
    found = {}
    for name, attempt in attempts(given).items():
        try:
            attempt()
            found[name] = "ok"
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno, str(error))
        except RuntimeError:
            found[name] = "RuntimeError"
    return found
"""
#: The answers inside; everything else is "ok" there.
INSIDE = {
    "dial a granted port": "ok",
    "dial another port": "EACCES",
    "dial another port by its first message": "EPERM",
    "open a file": "EACCES",
    "open a file for writing": "EACCES",
    "look at the root": "EACCES",
    "look at processes": "EACCES",
    "look at a file": "EACCES",
    "make a file in memory": "EPERM",
    "execute": "EPERM",
    "fork": "EPERM",
    "start a thread": "RuntimeError",
    "make a UDP socket": "EAFNOSUPPORT",
    "make a unix socket": "EAFNOSUPPORT",
    "make a netlink socket": "EAFNOSUPPORT",
    "listen": "EPERM",
    "signal the supervisor": "EPERM",
    "get hold of the supervisor": "EPERM",
    "be traced": "EPERM",
    "map executable memory": "EPERM",
    "change its name": "EPERM",
}


@pytest.fixture
def servers() -> Iterator[tuple[int, int]]:
    """Two ports of this host on which something listens."""
    with ExitStack() as stack:
        yield tuple(  # type: ignore[misc]
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)
        )


def outside(given: dict[str, Any]) -> dict[str, str]:
    code = f"{ATTEMPTS}\nimport json, sys\nprint(json.dumps(answer(json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(given)]
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def test_a_compromised_egress_process_reaches_only_the_granted_ports(servers: tuple[int, int]) -> None:
    granted, other = servers
    given = {"granted": granted, "other": other, "supervisor": os.getpid()}
    with running(CONFINED + ATTEMPTS + ANSWERING, (granted,)) as process:
        found = ask(process, given)
    expected = INSIDE if host().landlock >= PORTS_ABI else INSIDE | {"dial another port": "ok"}
    assert found == expected


def test_a_rule_for_datagrams_gives_sockets_for_udp_and_nothing_more(servers: tuple[int, int]) -> None:
    granted, other = servers
    given = {"granted": granted, "other": other, "supervisor": os.getpid()}
    code = """
def answer(given):
    found = {}
    for protocol in (0, 17, 1, 136):  # the usual one, UDP, an echo request, UDP-Lite
        try:
            made(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol)
            found[protocol] = "ok"
        except OSError as error:
            found[protocol] = errno.errorcode[error.errno]
    return found
"""
    with running(CONFINED + ATTEMPTS + ANSWERING, (granted,), udp=True) as process:
        found = ask(process, given)
    by_port = {} if host().landlock >= PORTS_ABI else {"dial another port": "ok"}
    assert found == INSIDE | by_port | {"make a UDP socket": "ok"}
    with running(CONFINED + ATTEMPTS + code + ANSWERING, udp=True) as process:
        refused = "EAFNOSUPPORT"
        assert ask(process, {}) == {"0": "ok", "17": "ok", "1": refused, "136": refused}


def test_outside_the_walls_every_attempt_succeeds(servers: tuple[int, int]) -> None:
    granted, other = servers
    given = {"granted": granted, "other": other, "supervisor": os.getpid()}
    # That there is no such program says that the kernel looked for it.
    assert outside(given) == dict.fromkeys(INSIDE, "ok") | {"execute": "ENOENT"}


#: TCP by another name, of which Landlock's ports know nothing.
MPTCP, SCTP = 262, 132


def test_no_other_protocol_gets_around_the_ports(servers: tuple[int, int]) -> None:
    _, other = servers
    code = f"""
def answer(given):
    found = []
    for protocol in ({MPTCP}, {SCTP}):
        try:
            socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol).connect(("127.0.0.1", {other}))
            found.append("ok")
        except OSError as error:
            found.append(os.strerror(error.errno))
    return {{"found": found}}
"""
    with running(CONFINED + code + ANSWERING) as process:
        assert ask(process, {})["found"] == [os.strerror(97)] * 2


def test_outside_a_connection_by_multipath_tcp_is_made(servers: tuple[int, int]) -> None:
    try:
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP)
    except OSError:
        applies(False, "this kernel has no multipath TCP")
    with caller:
        caller.connect(("127.0.0.1", servers[1]))


def test_two_egress_processes_do_not_see_each_other(servers: tuple[int, int]) -> None:
    code = """
def answer(given):
    found = []
    for number in range(1, 64):
        try:
            os.kill(number, 0)
            found.append(number)
        except OSError:
            pass
    return {"pid": os.getpid(), "found": found}
"""
    with running(CONFINED + code + ANSWERING) as one, running(CONFINED + code + ANSWERING) as other:
        assert ask(one, {}) == ask(other, {}) == {"pid": 2, "found": []}
