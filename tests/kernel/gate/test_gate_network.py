"""The network of a sandbox with rules: every address leads to listeners that the supervisor holds."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError, gate
from stockade.functions.warm_python import WarmPython
from stockade.gate import client, wire
from stockade.gate.network import NetworkListeners
from stockade.runs import launch
from stockade.runs.evidence import NAMESPACES
from stockade.runs.network.network_evidence import NetworkEvidence, observe_network
from support import bubblewraps, gatebuild
from support.means import applies, clauses_for, need

PORTS = (80, 443, 8443)
Order = Callable[[str], None]


class Network:
    """One living sandbox, its first process, and what was opened in its network."""

    def __init__(self, box: Sandbox, pid: int) -> None:
        assert box._box is not None
        self.box, self.pid, self._inner = box, pid, box._box

    @property
    def namespace(self) -> int:
        return self._inner.evidence.namespaces["net"]

    @contextlib.contextmanager
    def opened(self, ports: tuple[int, ...] = PORTS) -> Iterator[NetworkListeners]:
        resident = self._inner.connection.resident
        listeners = resident.open_network(self._inner.network_fd, ports).wait()
        try:
            yield listeners
        finally:
            listeners.close()

    def observed(self, listeners: NetworkListeners, ports: tuple[int, ...] = PORTS) -> NetworkEvidence:
        return observe_network(listeners, ports, self.pid, self.namespace)

    def python(self, script: str) -> str:
        return self.box.run(["/usr/bin/python3", "-c", script], timeout=60).check().text

    def attempts(self, *targets: tuple[int, str, int]) -> list[list[object]]:
        """The errno and the own address of a connection to each target."""
        found: list[list[object]] = json.loads(self.python(CONNECT.format(targets=targets)))
        return found


CONNECT = """
import json, socket
found = []
for family, address, port in {targets}:
    with socket.socket(family) as end:
        end.settimeout(5)
        found.append([end.connect_ex((address, port)), end.getsockname()[:2]])
print(json.dumps(found))
"""


@contextlib.contextmanager
def living(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, python: WarmPython | None = None
) -> Iterator[Network]:
    born: dict[int, int] = {}  # a WarmPython launches more than this one
    observe = launch.observe_birth

    def remembered(reply: wire.Reply, *rest: object) -> None:
        born[os.fstat(reply.descriptors[1 + NAMESPACES.index("net")]).st_ino] = reply.status
        observe(reply, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "observe_birth", remembered)
    with Sandbox(policy) if python is None else python.sandbox() as box:
        assert box._box is not None
        yield Network(box, born[box._box.evidence.namespaces["net"]])


BACKENDS = ["native", "bwrap-old", "bwrap-new"]


@pytest.fixture(params=BACKENDS)
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Policy:
    if request.param == "native":
        return Policy()
    version = bubblewraps.OLD if request.param == "bwrap-old" else bubblewraps.NEW
    bubblewraps.use(bubblewraps.program(version), monkeypatch)
    return Policy(**clauses_for("bwrap"))


@pytest.fixture
def network(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with living(policy, monkeypatch) as found:
        yield found


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with living(Policy(), monkeypatch) as found:
        yield found


def accepted(listeners: NetworkListeners) -> list[tuple[int, int, str]]:
    """Port, family and the address that a program asked for, of every connection that waits."""
    found = []
    for port, family, descriptor in listeners.tcp:
        with socket.socket(fileno=os.dup(descriptor)) as listener, contextlib.suppress(BlockingIOError):
            while True:
                end, _ = listener.accept()
                found.append((port, family, end.getsockname()[0]))
                end.close()
    return found


def ipv6_works() -> bool:
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6") as file:
        return file.read().strip() == "0"
    return False


FOUR = [(socket.AF_INET.value, "203.0.113.1", 443), (socket.AF_INET.value, "127.0.0.1", 8443)]
SIX = [(socket.AF_INET6.value, "2001:db8::7", 443), (socket.AF_INET6.value, "::1", 8443)]


def test_without_it_no_address_has_a_route(network: Network) -> None:
    assert [number for number, _ in network.attempts(FOUR[0], SIX[0])] == [errno.ENETUNREACH] * 2


def test_connections_to_any_address_arrive_and_tell_where_they_wanted_to_go(network: Network) -> None:
    need(ipv6_works(), "no IPv6")
    with network.opened() as listeners:
        assert listeners.ipv6
        assert [number for number, _ in network.attempts(*FOUR, *SIX)] == [0] * 4
        assert accepted(listeners) == [
            (443, 4, "203.0.113.1"),
            (8443, 4, "127.0.0.1"),
            (443, 6, "2001:db8::7"),
            (8443, 6, "::1"),
        ]


def test_a_port_without_a_listener_refuses(network: Network) -> None:
    with network.opened():
        [[number, _]] = network.attempts((socket.AF_INET.value, "203.0.113.1", 22))
        assert number == errno.ECONNREFUSED


def test_what_was_opened_is_as_the_supervisor_expects(network: Network) -> None:
    need(ipv6_works(), "no IPv6")
    with network.opened() as listeners:
        evidence = network.observed(listeners)
    assert evidence.namespace == network.namespace
    assert evidence.routes == ("local 0.0.0.0/0", "local ::/0")
    assert evidence.listeners[:4] == ("tcp4/53", "tcp4/80", "tcp4/443", "tcp4/8443")
    assert evidence.listeners[-2:] == ("udp4/53", "udp6/53")


def test_in_a_copy_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        WarmPython() as python,
        living(Policy(), monkeypatch, python) as network,
        network.opened() as listeners,
    ):
        network.observed(listeners)
        assert network.attempts(FOUR[0])[0][0] == 0
        assert accepted(listeners) == [(443, 4, "203.0.113.1")]


def test_questions_over_udp_are_answered_from_the_address_that_was_asked(native: Network) -> None:
    need(ipv6_works(), "no IPv6")
    ask = (
        "import socket\n"
        "for family, address in ((2, '192.0.2.53'), (10, '2001:db8::53')):\n"
        "    end = socket.socket(family, socket.SOCK_DGRAM)\n"
        "    end.settimeout(20)\n"
        "    end.connect((address, 53))\n"
        "    end.send(b'question')\n"
        "    print(end.recv(100).decode(), flush=True)\n"
    )
    with native.opened() as listeners, native.box.start(["/usr/bin/python3", "-c", ask]) as process:
        for _, _, descriptor in listeners.udp:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                end.settimeout(20)
                data, ancillary, _, client_address = end.recvmsg(512, 256)
                assert data == b"question"
                end.sendmsg([b"answer"], [ancillary[0]], 0, client_address)
        assert process.stdout is not None
        assert process.stdout.read() == b"answer\nanswer\n"


BIND = """
import itertools, json, socket
options = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
addresses = [(2, "0.0.0.0"), (2, "127.0.0.1"), (2, "198.18.0.2"), (2, "203.0.113.9"),
             (10, "::"), (10, "::1"), (10, "fd00:5afe::2"), (10, "2001:db8::9"), (10, "::ffff:127.0.0.1")]
got = []
for (family, address), chosen, only in itertools.product(addresses, options, (0, 1)):
    with socket.socket(family) as end:
        for option in chosen:
            end.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == 10:
            end.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        try:
            end.bind((address, 8443))
            end.listen()
        except OSError:
            continue
        got.append([address, list(chosen), only])
print(json.dumps(got))
"""


def test_a_program_cannot_bind_a_port_of_the_rules(network: Network) -> None:
    assert len(json.loads(network.python(BIND))) > 8, "without listeners it can"
    with network.opened():
        assert json.loads(network.python(BIND)) == []


def test_every_port_that_a_policy_may_have(native: Network) -> None:
    ports = tuple(range(20000, 20064))
    with native.opened(ports) as listeners:
        assert len(listeners.tcp) == 65 * (1 + listeners.ipv6)
        native.observed(listeners, ports)


def test_more_ports_are_refused_before_anything_is_asked(native: Network) -> None:
    for ports in (tuple(range(20000, 20065)), (0,), (65536,), (-1,)):
        with pytest.raises(ValueError, match="at most 64 ports"), native.opened(ports):
            pass


def test_a_second_time_is_refused(native: Network) -> None:
    with native.opened():
        with pytest.raises(SetupError, match="IPv4 address") as caught, native.opened():
            pass
        assert (caught.value.stage, caught.value.errno) == ("network", errno.EEXIST)


def test_more_ports_can_be_added(network: Network) -> None:
    resident, namespace = network._inner.connection.resident, network._inner.network_fd
    with network.opened() as first:
        more = resident.open_network(namespace, (9000, 9001), more=True).wait()
        assert [port for port, family, _ in more.tcp if family == 4] == [9000, 9001] and more.udp == []
        families = (4, 6) if first.ipv6 else (4,)
        by_place = {(port, family): one for port, family, one in (*first.tcp, *more.tcp)}
        wanted = [(port, family) for family in families for port in (53, 80, 443, 8443, 9000, 9001)]
        listeners = NetworkListeners(
            tcp=[(port, family, by_place[port, family]) for port, family in wanted],
            udp=first.udp,
            ipv6=more.ipv6,
            namespace=more.namespace,
            questions=more.questions,
        )
        network.observed(listeners, (*PORTS, 9000, 9001))
        assert network.attempts((int(socket.AF_INET), "93.184.216.34", 9001))[0][0] == 0
        for _, _, descriptor in more.tcp:
            os.close(descriptor)
        os.close(more.namespace)
        os.close(more.questions)


def test_ports_cannot_be_added_to_a_network_without_routes(native: Network) -> None:
    resident = native._inner.connection.resident
    with pytest.raises(SetupError, match="IPv4 routes and addresses"):
        resident.open_network(native._inner.network_fd, (9000,), more=True).wait()


def test_a_port_that_a_program_has_bound_is_named(native: Network) -> None:
    resident, namespace = native._inner.connection.resident, native._inner.network_fd
    bind = "import socket, sys; s = socket.create_server(('127.0.0.1', 9001)); print(flush=True); input()"
    with native.opened(), native.box.start(["/usr/bin/python3", "-c", bind], stdin=-1) as program:
        assert program.stdout is not None and program.stdout.readline() == b"\n"
        with pytest.raises(PolicyError, match="port 9001 is taken by a program in the sandbox"):
            resident.open_network(namespace, (9000, 9001), more=True).wait()


def test_the_hosts_network_is_refused(native: Network) -> None:
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open("/proc/self/ns/uts", os.O_RDONLY)
    nothing = os.open("/dev/null", os.O_RDONLY)
    try:
        for descriptor in (own, other, nothing):
            resident = native._inner.connection.resident
            with pytest.raises(SetupError, match="namespace") as caught:
                resident.open_network(descriptor, PORTS).wait()
            assert caught.value.stage == "network"
    finally:
        for descriptor in (own, other, nothing):
            os.close(descriptor)
    native.attempts(FOUR[0])


def in_namespace(namespace: int, action: Callable[[], object]) -> bool:
    """Whether a child that enters the network namespace can do something there."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if ctypes.CDLL(None).setns(namespace, 0x40000000) == 0 and action() is not None else 1)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def make_device() -> int:
    """Make a device that is up and stays: TUNSETIFF, TUNSETPERSIST, SIOCSIFFLAGS."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("=16sH22x", b"out0", 0x1001))
    fcntl.ioctl(tun, 0x400454CB, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        return len(fcntl.ioctl(end, 0x8914, struct.pack("=16sH22x", b"out0", 1)))


def test_a_namespace_with_a_device_that_leads_out_is_refused(native: Network) -> None:
    applies(os.geteuid() == 0, "only root makes a device in the namespace")
    need(in_namespace(native._inner.network_fd, make_device), "no /dev/net/tun")
    with pytest.raises(SetupError, match="another device"), native.opened():
        pass


def test_without_ipv6_there_is_ipv4_alone(native: Network) -> None:
    applies(os.geteuid() == 0, "only root turns IPv6 off in the namespace")
    setting = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    turned_off = in_namespace(native._inner.network_fd, lambda: Path(setting).write_text("1"))
    need(turned_off, "IPv6 cannot be turned off")
    with native.opened() as listeners:
        assert not listeners.ipv6
        assert {family for _, family, _ in listeners.tcp} == {4}
        evidence = native.observed(listeners)
        assert evidence.routes == ("local 0.0.0.0/0",)
        numbers = [number for number, _ in native.attempts(FOUR[0], SIX[0])]
        assert numbers[0] == 0 and numbers[1] != 0


def test_the_resident_goes_on(native: Network) -> None:
    """It launches sandboxes whose networks lead nowhere, and stays in no other's namespace."""
    with native.opened():
        for _ in range(3):
            result = stockade.run(["/usr/bin/python3", "-c", CONNECT.format(targets=[FOUR[0]])])
            assert json.loads(result.check().text)[0][0] == errno.ENETUNREACH


def test_the_listeners_of_two_sandboxes_are_apart(native: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    with living(Policy(), monkeypatch) as other, native.opened() as one, other.opened() as two:
        native.observed(one)
        other.observed(two)
        with pytest.raises(SetupError, match="network namespace"):
            native.observed(two)
        mixed = NetworkListeners(
            tcp=one.tcp, udp=two.udp, ipv6=one.ipv6, namespace=one.namespace, questions=one.questions
        )
        with pytest.raises(SetupError, match="not in one network namespace"):
            native.observed(mixed)
        with pytest.raises(SetupError, match="one listener for each port"):
            native.observed(one, (80, 443))
        for questions, problem in [
            (two.questions, "not in one network namespace"),
            (one.tcp[0][2], "of another kind"),
            (one.namespace, "blocks"),
        ]:
            with pytest.raises(SetupError, match=problem):
                native.observed(msgspec.structs.replace(one, questions=questions))


class Request(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("ports", ctypes.c_uint16 * wire.MAX_PORTS),
        ("datagrams", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
    ]


def problem(data: bytes, descriptors: int = wire.NETWORK_DESCRIPTORS) -> str | None:
    library = ctypes.CDLL(gate.library())
    library.network_problem.restype = ctypes.c_char_p
    found = library.network_problem(ctypes.byref(Request.from_buffer_copy(data)), descriptors)
    return None if found is None else found.decode()


def message(*ports: int, count: int | None = None, datagrams: int = 0, flags: int = 0) -> bytes:
    padded = (*ports, *[0] * (wire.MAX_PORTS - len(ports)))
    counted = len(ports) if count is None else count
    return wire.RESIDENT_REQUEST.pack(wire.RESIDENT_NETWORK, counted, *padded, datagrams, flags)


@pytest.mark.parametrize(
    ("data", "descriptors", "reason"),
    [
        (message(53), 2, None),
        (message(*range(1, 67)), 2, None),
        (message(53, 53, datagrams=1), 2, None),
        (message(53, datagrams=1), 2, None),
        (message(53, 53, datagrams=0), 2, "order"),
        (message(53, 80, 80, datagrams=2), 2, "order"),
        (message(53, datagrams=2), 2, "count"),
        (message(80, datagrams=1, flags=wire.NETWORK_LOOPBACK), 2, "flags"),
        (message(1, 65535), 2, None),
        (message(53), 1, "descriptors"),
        (message(53), 3, "descriptors"),
        (message(53), 0, "descriptors"),
        (message(), 2, "count"),
        (message(*range(1, 67), count=67), 2, "count"),
        (message(53, count=0xFFFFFFFF), 2, "count"),
        (message(53, count=2), 2, "port"),
        (message(53, 80, count=1), 2, "port"),
        (message(0, 80), 2, "port"),
        (message(80, 53), 2, "order"),
        (message(80, 80), 2, "order"),
        (message(80, flags=wire.NETWORK_MORE), 2, None),
        (message(80, flags=wire.NETWORK_LOOPBACK), 2, None),
        (message(53, flags=wire.NETWORK_MORE | wire.NETWORK_LOOPBACK), 2, "flags"),
        (message(53, flags=4), 2, "flags"),
        (message(53, flags=0x8001), 2, "flags"),
    ],
)
def test_a_request_is_checked(data: bytes, descriptors: int, reason: str | None) -> None:
    assert problem(data, descriptors) == reason


def test_any_bytes_are_checked() -> None:
    chance = random.Random(18)
    for _ in range(2000):
        streams, datagrams = (sorted(chance.sample(range(1, 65536), chance.randint(0, 33))) for _ in range(2))
        data = bytearray(message(*streams, *datagrams, datagrams=len(datagrams)))
        for _ in range(chance.randint(0, 4)):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        request = Request.from_buffer_copy(data)
        ports = [*request.ports[: min(request.count, wire.MAX_PORTS)]]
        parts = ports[: len(ports) - request.datagrams], ports[len(ports) - request.datagrams :]
        is_good = (
            1 <= request.count <= wire.MAX_PORTS
            and request.datagrams <= request.count
            and 0 not in ports
            and all(part == sorted({*part}) for part in parts)
            and not any(request.ports[request.count :])
            and request.flags in (0, wire.NETWORK_MORE, wire.NETWORK_LOOPBACK)
            and not (request.flags == wire.NETWORK_LOOPBACK and request.datagrams)
        )
        assert (problem(bytes(data)) is None) is is_good


def test_messages_that_are_none_leave_the_resident_alone(native: Network) -> None:
    resident = native._inner.connection.resident
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        launch_size = wire.RESIDENT_REQUEST_SIZE
        for data in (
            bytes(4),
            bytes(launch_size - 1),
            bytes(launch_size + 1),
            message(53)[:8],
            os.urandom(8192),
        ):
            wire.send_with_descriptors(resident._socket, data, (spare,))
            resident._socket.send(data)
        for data in (bytes(launch_size), message(53), b"\xff" * launch_size, message()):
            for count in (1, 2, 3, 200):
                wire.send_with_descriptors(resident._socket, data, (spare,) * count)
            resident._socket.send(data)
    finally:
        os.close(spare)
    with native.opened() as listeners:
        native.observed(listeners)
    assert stockade.run(["true"]).ok


#: Bits of enum network_sabotage in gate.h.
NOT_CONFIRMED = 1
STEPS = {
    "IPv4 route": 2, "IPv6 route": 4, "IPv4 address": 8, "IPv6 address": 16, "other port": 32,
    "SO_REUSEPORT": 64, "SO_REUSEADDR": 128, "no listen": 256, "other namespace": 512,
}  # fmt: skip


class TestSabotage:
    """A child of the resident that leaves something out: it notices itself, and so does the supervisor."""

    @pytest.fixture
    def order(self, sabotaged_gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
        def give(word: str) -> None:
            client.shutdown()
            monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (word,))

        monkeypatch.setattr("stockade.gate.executable", lambda: str(sabotaged_gate))
        yield give
        client.shutdown()

    def test_nothing_is_noticed_where_nothing_is_left_out(
        self, order: Order, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for steps in (0, NOT_CONFIRMED):
            order(f"network:{steps}")
            with living(Policy(), monkeypatch) as network, network.opened() as listeners:
                network.observed(listeners)

    @pytest.mark.parametrize("step", STEPS)
    def test_the_supervisor_notices(self, step: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
        need(ipv6_works() or "IPv6" not in step, "no IPv6")
        order(f"network:{STEPS[step] | NOT_CONFIRMED}")
        with (
            living(Policy(), monkeypatch) as network,
            network.opened() as listeners,
            pytest.raises(SetupError) as caught,
        ):
            network.observed(listeners)
        assert caught.value.stage == "evidence"

    @pytest.mark.parametrize("step", [step for step in STEPS if "IPv" in step])
    def test_the_gate_notices(self, step: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
        need(ipv6_works() or "IPv6" not in step, "no IPv6")
        order(f"network:{STEPS[step]}")
        with (
            living(Policy(), monkeypatch) as network,
            pytest.raises(SetupError, match="routes and addresses"),
            network.opened(),
        ):
            pass


def test_under_the_sanitizers(sanitized_gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sanitized_gate))
    try:
        with living(Policy(), monkeypatch) as network, network.opened() as listeners:
            network.observed(listeners)
            with pytest.raises(SetupError), network.opened():
                pass
    finally:
        client.shutdown()
    assert gatebuild.reports(sanitized_gate) == []


def test_a_supervisor_that_does_not_wait_leaves_nothing(native: Network) -> None:
    resident = native._inner.connection.resident
    for _ in range(3):
        resident.open_network(native._inner.network_fd, PORTS).close()
    limit = time.monotonic() + 10
    children = Path(f"/proc/{resident.pid}/task/{resident.pid}/children")
    while len(children.read_text().split()) > 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert stockade.run(["true"]).ok


def test_a_resident_that_has_ended_is_an_error_with_a_reason(native: Network) -> None:
    client.shutdown()
    with pytest.raises(SetupError, match="has ended") as caught, native.opened():
        pass
    assert caught.value.stage == "network"
