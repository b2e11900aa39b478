"""A sandbox with network rules from launch to end: what fails leaves nothing, and nothing falls open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import stockade
from stockade import Policy
from stockade.errors import SetupError
from stockade.gate import client
from stockade.runs.network import (
    egress_configuration,
    egress_launch,
    egress_process,
    egress_template,
    resolver_process,
)
from support import leaks

#: Connects, and prints what it gets or why not.
CONNECT = """
import errno, socket, sys
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as s:
        print(s.recv(10).decode() or "closed")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port of the host's loopback, on which a server says hello."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            server.settimeout(0.1)
            while not done.is_set():
                with contextlib.suppress(TimeoutError), server.accept()[0] as end:
                    end.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join()


def connect(port: int) -> list[str]:
    return ["python3", "-c", CONNECT, str(port)]


def rules(port: int, **more: Any) -> Policy:
    return Policy(net=[f"127.0.0.1:{port}"], **more)


def test_a_rule_for_an_address_of_the_host_leads_there(port: int) -> None:
    result = stockade.run(connect(port), rules(port))
    assert result.text == "hello\n", result
    (one,) = result.network
    assert (one.target, one.received, result.usage.bytes_received) == (f"127.0.0.1:{port}", 5, 5)
    assert stockade.run(connect(port), Policy()).text == "ECONNREFUSED\n"


def test_what_the_program_sends_at_its_very_end_arrives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
            "s.sendall(b'x' * 1000000); import os; os._exit(0)"
        )
        got = bytearray()

        def read() -> None:
            end, _ = server.accept()
            with end:
                while data := end.recv(65536):
                    got.extend(data)

        thread = threading.Thread(target=read)
        thread.start()
        number = server.getsockname()[1]
        assert stockade.run(["python3", "-c", code, str(number)], rules(number)).ok
        thread.join(10)
        assert len(got) == 1000000


@pytest.mark.parametrize("step", ["listeners", "evidence", "egress", "resolver", "configure"])
def test_a_step_that_fails_starts_nothing_and_leaves_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise SetupError(f"{step} failed", stage=step)
        yield

    def fail_at_once(*_: object, **__: object) -> None:
        raise SetupError(f"{step} failed", stage=step)

    if step == "listeners":
        monkeypatch.setattr(client.Resident, "open_network", fail_at_once)
    elif step == "evidence":
        monkeypatch.setattr(egress_launch, "observe_network", fail_at_once)
    elif step == "egress":
        monkeypatch.setattr(egress_launch, "launch_egress", fail)
    elif step == "resolver":
        monkeypatch.setattr(egress_configuration, "connect_resolver", fail)
    else:
        monkeypatch.setattr(egress_process.EgressProcess, "configure", fail)
    with pytest.raises(SetupError, match=f"{step} failed") as caught:
        stockade.run(connect(port), rules(port))
    assert caught.value.stage == step
    assert caught.value.receipt is not None and caught.value.receipt.predicate.network.mode == "rules"
    assert caught.value.receipt.predicate.network.egress is None


def test_a_template_that_was_killed_is_started_again(port: int) -> None:
    assert stockade.run(connect(port), rules(port)).text == "hello\n"
    template = egress_template.egress_template()
    os.kill(client.resident("host-network", scoped=False, template=template).pid, signal.SIGKILL)
    assert stockade.run(connect(port), rules(port)).text == "hello\n"


def test_a_resolver_that_was_killed_is_started_again(port: int) -> None:
    assert stockade.run(connect(port), rules(port)).text == "hello\n"
    for pid in resolver_process.resolver_pids():
        os.kill(pid, signal.SIGKILL)
    assert stockade.run(connect(port), rules(port)).text == "hello\n"


def test_the_supervisor_keeps_no_listener(port: int) -> None:
    """Otherwise connections would wait in it for ever once the egress process has ended."""
    with stockade.Sandbox(rules(port)) as box:
        assert box.run(connect(port)).text == "hello\n"
        kept = [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(name)]
        for descriptor in kept:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                assert not listens or end.getsockname() == ("127.0.0.1", port)


def _is_socket(name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    return False


def test_a_killed_egress_process_refuses_and_is_reported_in_the_receipt_and_the_result(port: int) -> None:
    with stockade.Sandbox(rules(port)) as box:
        assert box.run(connect(port)).text == "hello\n"
        assert box._box is not None and box._box.egress is not None
        signal.pidfd_send_signal(box._box.egress.process.pidfd, signal.SIGKILL)
        result = box.run(connect(port))
        assert result.text == "ECONNREFUSED\n"
        assert any("the egress process ended at" in warning for warning in result.warnings)


def test_a_supervisor_that_forked_has_an_egress_of_its_own(port: int) -> None:
    assert stockade.run(connect(port), rules(port)).text == "hello\n"
    with stockade.Sandbox(rules(port)) as box:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, stockade.run(connect(port), rules(port)).stdout)
                leaks.let_go_of_register()
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 100) == b"hello\n"
        os.close(reader)
        os.waitpid(child, 0)
        assert box.run(connect(port)).text == "hello\n"


def test_a_port_that_the_rules_let_out_cannot_be_taken_inside(port: int) -> None:
    code = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))"
    result = stockade.run(["python3", "-c", code, str(port)], rules(port))
    assert not result.ok and "Address already in use" in result.stderr_text
    assert os.strerror(errno.EADDRINUSE) == "Address already in use"


def test_a_sandboxed_program_asks_for_a_sandbox_with_fewer_rules(port: int) -> None:
    code = f"""
import sys
from stockade.inside import delegate
for net in (["127.0.0.1:{port}"], [], ["127.0.0.1:{port}", "127.0.0.2:{port}"]):
    try:
        print(delegate(["python3", "-c", {CONNECT!r}, "{port}"], {{"net": net}}).stdout.decode().strip())
    except Exception as error:
        print(type(error).__name__)
"""
    policy = rules(port, delegate=True, read=[os.path.dirname(os.path.dirname(stockade.__file__))])
    env = {"PYTHONPATH": os.path.dirname(os.path.dirname(stockade.__file__))}
    result = stockade.run([os.path.realpath(sys.executable), "-c", code], policy, env=env)
    assert result.text.split() == ["hello", "ECONNREFUSED", "PermissionError"], (
        result.text + result.stderr_text
    )


def test_a_spawner_starts_sandboxes_with_rules(port: int) -> None:
    with stockade.Spawner(rules(port)) as spawner:
        numbers = [spawner.spawn(connect(port)) for _ in range(3)]
        assert [spawner.collect(number, 30).text for number in numbers] == ["hello\n"] * 3


@pytest.mark.parametrize("count", [20])
def test_many_sandboxes_at_once_each_with_its_egress(port: int, count: int) -> None:
    with contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(stockade.Sandbox(rules(port))) for _ in range(count)]
        assert [box.run(connect(port)).text for box in boxes] == ["hello\n"] * count


def test_everything_ends_with_a_supervisor_that_is_killed(port: int) -> None:
    code = f"""
import stockade, sys, time
box = stockade.Sandbox(stockade.Policy(net=["127.0.0.1:{port}"]))
box.open()
print(box.run(["python3", "-c", {CONNECT!r}, "{port}"]).text, box._box.egress.process.pidfd, flush=True)
time.sleep(60)
"""
    own = {process.pid for process in leaks.family()}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline() == "hello\n"
        supervisor.stdout.readline()
        family = {process.pid for process in leaks.family()} - own - {supervisor.pid}
        assert len(family) >= 4  # the gates of the sandbox and of its egress, their residents, the resolver
        supervisor.kill()
        supervisor.wait()
    until = time.monotonic() + 5
    while (left := {process.pid for process in leaks.family()} & family) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    stockade.run(["true"])  # which removes what the register still has


def test_cancelling_a_run_ends_its_egress_process(port: int) -> None:
    async def main() -> None:
        run = stockade.run_async(["sleep", "60"], rules(port))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(run, 1.5)

    asyncio.run(main())
