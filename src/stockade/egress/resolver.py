"""The resolver: looks names up for the egress processes of one supervisor, with the host's own view.

It runs outside every sandbox, so that /etc/hosts, /etc/resolv.conf and /etc/nsswitch.conf are what they are
now on the host, also after another file took their place. The C library parses here what servers answer, so
the process is confined before the first name: it reads those files and libraries, writes none, executes
nothing, and as root has become nobody. It decides nothing and remembers nothing.

Descriptor 3 is a SEQPACKET socket to the supervisor, 4 a pidfd of it. The first message is the plan of the
walls. Each later one brings the socket of one egress process, on which a request is an id of four bytes and a
name, and an answer the same id and JSON: {"addresses": [...]} or {"error": "not found" | "try again" |
"failed"}.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import re
import selectors
import socket
import sys
import threading
from collections import deque

CONTROL, SUPERVISOR = 3, 4
PR_SET_NAME = 15
#: As the kernel has room for it.
PROCESS_NAME = b"stockade-resolv"
NOBODY = 65534
#: Lookups at once: of all egress processes, and of one.
MOST_LOOKUPS, MOST_OF_ONE = 32, 8
#: How many requests of one egress process wait; a further one gets "try again".
MOST_WAITING = 64
MOST_ADDRESSES = 64
MOST_PLAN = 1 << 16
HOSTS, MOST_HOSTS = "/etc/hosts", 16 << 20
NAME = re.compile(rb"[A-Za-z0-9_.-]{1,253}")
ID_BYTES = 4
#: A lookup needs less; 32 of the usual 8 MiB would count as address space.
STACK_BYTES = 512 << 10

Answer = dict[str, object]
TRY_AGAIN: Answer = {"error": "try again"}
FAILED: Answer = {"error": "failed"}
#: By the error of getaddrinfo; EAI_NODATA is not in every C library.
ANSWERS: dict[int | None, Answer] = {
    socket.EAI_NONAME: {"error": "not found"},
    getattr(socket, "EAI_NODATA", socket.EAI_NONAME): {"error": "not found"},
    socket.EAI_AGAIN: TRY_AGAIN,
}


class _ConfinementReport(ctypes.Structure):
    """struct confinement of gate/src/wire.h."""

    _fields_ = (
        ("begun", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("rules", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("filter", ctypes.c_char * 65),
        ("text", ctypes.c_char * 128),
    )


class EgressPeer:
    """One egress process: its socket, what it waits for, and how many lookups it has under way."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.waiting: deque[tuple[bytes, bytes]] = deque()
        self.active = 0


class Resolver:
    """Reads requests in one thread, and looks names up in others."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._clients: deque[EgressPeer] = deque()
        self._active = 0
        self._done: deque[tuple[EgressPeer, bytes, Answer]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def serve(self) -> None:
        """Serve until the supervisor has gone."""
        control, supervisor, bell = self._control.fileno(), SUPERVISOR, self._bell
        for descriptor in (control, supervisor, bell):
            self._selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, EgressPeer):
                    self._read_request(key.data)
                elif key.fd == bell:
                    os.eventfd_read(bell)
                    self._answer_all()
                elif key.fd == supervisor or not self._admit():
                    return
            self._begin_lookups()

    def _admit(self) -> bool:
        """Take the socket of another egress process; say whether the supervisor is still there."""
        try:
            data, ancillary, *_ = self._control.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        numbers = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(content[: len(content) // 4 * 4])
        for number in numbers:
            client = EgressPeer(socket.socket(fileno=number))
            client.socket.setblocking(False)
            self._selector.register(client.socket, selectors.EVENT_READ, client)
            self._clients.append(client)
        return bool(data)

    def _read_request(self, client: EgressPeer) -> None:
        try:
            request = client.socket.recv(ID_BYTES + 256)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if len(request) < ID_BYTES:
            self._drop(client)
            return
        number, name = request[:ID_BYTES], request[ID_BYTES:]
        if not NAME.fullmatch(name):
            self._answer(client, number, FAILED)
        elif len(client.waiting) >= MOST_WAITING:
            self._answer(client, number, TRY_AGAIN)
        else:
            client.waiting.append((number, name))

    def _begin_lookups(self) -> None:
        """Start lookups in turn.

        None may have more threads than are left for the others, so that those whose servers do not answer
        cannot take all of them.
        """
        begun = True
        while begun:
            begun = False
            for _ in range(len(self._clients)):
                client = self._clients[0]
                self._clients.rotate(-1)
                free = MOST_LOOKUPS - self._active
                if client.waiting and client.active < min(MOST_OF_ONE, free):
                    begun = self._begin(client, *client.waiting.popleft()) or begun

    def _begin(self, client: EgressPeer, number: bytes, name: bytes) -> bool:
        thread = threading.Thread(target=self._look_up, args=(client, number, name), daemon=True)
        client.active += 1
        self._active += 1
        try:
            thread.start()
        except RuntimeError:  # the user's limit of tasks is reached
            client.active -= 1
            self._active -= 1
            self._answer(client, number, TRY_AGAIN)
            return False
        return True

    def _look_up(self, client: EgressPeer, number: bytes, name: bytes) -> None:
        answer = FAILED
        try:
            answer = look_up(name)
        finally:
            self._done.append((client, number, answer))
            os.eventfd_write(self._bell, 1)

    def _answer_all(self) -> None:
        while self._done:
            client, number, answer = self._done.popleft()
            client.active -= 1
            self._active -= 1
            self._answer(client, number, answer)

    def _answer(self, client: EgressPeer, number: bytes, answer: Answer) -> None:
        try:
            client.socket.send(number + json.dumps(answer).encode())
        except OSError:
            # It has gone, or does not read its answers.
            self._drop(client)

    def _drop(self, client: EgressPeer) -> None:
        if client.socket.fileno() >= 0:
            self._selector.unregister(client.socket)
            self._clients.remove(client)
            client.waiting.clear()
            client.socket.close()


def look_up(name: bytes) -> Answer:
    """Return the addresses of a name in the order of the host's own resolver, or why there are none.

    The host's search domains are for names without a dot. To one with a dot, which a rule names in full, they
    would add a domain that no rule names: where it is missing or, with `ndots`, before it is even asked for.
    """
    if b"." in name and not is_in_hosts(name):
        name += b"."
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return ANSWERS.get(error.errno, FAILED)
    except (OSError, ValueError):
        return FAILED
    addresses = dict.fromkeys(str(place[0]).partition("%")[0] for *_, place in found)
    return {"addresses": list(addresses)[:MOST_ADDRESSES]}


def is_in_hosts(name: bytes) -> bool:
    """Whether /etc/hosts has a name; the C library finds it there only without a final dot."""
    try:
        with open(HOSTS, "rb", buffering=0) as file:
            text = file.read(MOST_HOSTS).lower()
    except OSError:
        return False
    wanted = name.lower()
    # Lists of many thousand lines are usual.
    return wanted in text and any(
        wanted in line.partition(b"#")[0].split()[1:] for line in text.splitlines() if wanted in line
    )


def become_nobody() -> None:
    """Give up root's files; where only root's own id is mapped, there is no other to become."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)


def confine(library: ctypes.CDLL, plan: bytes) -> Answer:
    """Raise the walls of the plan around this process, and return what the gate's library says of them."""
    report = _ConfinementReport()
    refused = library.gate_confine(plan, ctypes.c_size_t(len(plan)), None, 0, ctypes.byref(report))
    return {
        "confined": not refused,
        "rules": report.rules,
        "filter": report.filter.decode(),
        "error": f"{report.text.decode('utf-8', 'replace')}: {os.strerror(report.error)}" if refused else "",
    }


def main() -> None:
    """Confine this process by the plan that the supervisor sends, then serve."""
    # A supervisor may have others that programs inherit.
    os.closerange(SUPERVISOR + 1, os.sysconf("SC_OPEN_MAX"))
    control = socket.socket(fileno=CONTROL)
    library = ctypes.CDLL(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_NAME, PROCESS_NAME, 0, 0, 0)
    plan = control.recv(MOST_PLAN)
    if not plan:
        return
    become_nobody()
    said = confine(library, plan)
    control.send(json.dumps(said).encode())
    if said["confined"]:
        threading.stack_size(STACK_BYTES)
        Resolver(control).serve()
    os._exit(0)
