"""The resident gate: started when it is needed, gone with its supervisor, and holding nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.gate import client
from support.means import applies


@pytest.fixture
def resident() -> int:
    """The process id of this process's own resident gate."""
    stockade.run(["true"]).check()
    return client._residents["own-network", False].pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int) -> bool:
    limit = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    return not is_alive(pid)


def descriptors(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    return sorted(os.readlink(f"{directory}/{number}") for number in os.listdir(directory))


def test_one_serves_every_launch(resident: int) -> None:
    for _ in range(3):
        stockade.run(["true"]).check()
    assert client._residents["own-network", False].pid == resident


def test_it_is_started_again_when_it_was_killed(resident: int) -> None:
    os.kill(resident, signal.SIGKILL)
    assert ends(resident)
    assert stockade.run(["echo", "again"]).text == "again\n"
    assert client._residents["own-network", False].pid != resident


def test_a_sandbox_outlives_its_resident_gate() -> None:
    with Sandbox() as box:
        client.shutdown()
        assert box.run(["echo", "alive"]).text == "alive\n"
        assert stockade.run(["echo", "new"]).text == "new\n"


def test_a_policy_that_shares_the_hosts_network_has_a_gate_of_its_own(resident: int) -> None:
    inside = stockade.run(["readlink", "/proc/self/ns/net"], Policy(net="open")).text.strip()
    assert inside == os.readlink("/proc/self/ns/net")
    assert client._residents["host-network", False].pid != resident
    assert stockade.run(["readlink", "/proc/self/ns/net"]).text.strip() != inside


CHILD = """
import os, sys
import stockade
from stockade.gate import client
box = stockade.Sandbox()
box.open()
print(client._residents["own-network", False].pid, flush=True)
import threading
threading.Thread(target=lambda: box.run(["sleep", "300"]), daemon=True).start()
sys.stdin.read()
"""


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return found


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_and_its_sandboxes_die_with_the_supervisor(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        gate = int(host.stdout.readline())
        time.sleep(0.3)
        inside = children(gate)
        assert inside, "the sandbox's first process is a child of the resident gate"
        everything = [gate, *inside, *(child for first in inside for child in children(first))]
        assert len(everything) >= 3 and all(map(is_alive, everything))
        host.send_signal(number)
        host.wait()
        assert [pid for pid in everything if not ends(pid)] == []


@pytest.mark.usefixtures("swept")
def test_a_fork_of_the_supervisor_does_not_keep_it_alive() -> None:
    script = (
        "import os, time, stockade\n"
        "from stockade.gate import client\n"
        "stockade.run(['true'])\n"
        "print(client._residents['own-network', False].pid, flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.close(1); time.sleep(20); os._exit(0)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert ends(int(done.stdout))
    for pid in children(os.getpid()):
        if "python" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(pid, signal.SIGKILL)


def test_a_sandbox_takes_one_key_of_the_users() -> None:
    own = os.geteuid()

    def used() -> int:
        lines = Path("/proc/key-users").read_text().splitlines()
        counts = [line.split() for line in lines if int(line.partition(":")[0]) == own]
        return int(counts[0][3].partition("/")[0]) if counts else 0

    def taken() -> int:
        for _ in range(2):  # what is made ahead has its own, now and afterwards
            stockade.run(["true"]).check()
        time.sleep(0.5)  # the kernel collects what is unused
        before = used()
        boxes = [Sandbox() for _ in range(5)]
        for box in boxes:
            box.open()
        found = used() - before
        for box in boxes:
            box.close()
        return found

    # The user's other processes may take some meanwhile.
    assert any(taken() <= 5 for _ in range(6))


def spare(gate: int) -> int:
    """What the gate has made ahead, once it has."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for pid in children(gate):
            if named(pid) == "stockade-spare":
                return pid
        time.sleep(0.005)
    raise AssertionError("nothing is made ahead")


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)


class TestAhead:
    """From the second launch on, the first process of the next sandbox is made before it is asked for."""

    @pytest.fixture
    def made(self, resident: int) -> int:
        stockade.run(["true"]).check()
        return spare(resident)

    def test_it_becomes_the_next_sandbox(self, resident: int, made: int) -> None:
        with Sandbox(Policy(toolchain=False)) as box:
            assert made in children(resident)
            assert named(made) == "stockade-gate"
            assert box.run(["echo", "inside"]).text == "inside\n"
        assert ends(made)

    def test_nothing_tells_it_from_one_that_was_not(self, resident: int) -> None:
        look = (
            "cut -d' ' -f4- /proc/self/mountinfo; stat -c '%N %A %u %g' /* /dev/* /etc/*; ls -A /tmp; "
            "hostname; id; ulimit -a; "
            "grep -v -e ^Pid -e ^PPid -e ctxt -e ^Vm -e ^Rss -e ^NStgid -e ^NSpid /proc/1/status; ls -A ~"
        )
        first = stockade.run(["true"])
        kill(spare(resident))
        plain = Policy(toolchain=False)
        cold = stockade.run(["sh", "-c", look], plain).text
        spare(resident)
        ahead = stockade.run(["sh", "-c", look], plain).text
        assert first.ok and without_devices(ahead) == without_devices(cold)

    def test_it_serves_either_of_two_plans_that_alternate(
        self, resident: int, made: int, tmp_path: Path
    ) -> None:
        (data := tmp_path / "data").mkdir()
        granted = Policy(read=[str(data)], toolchain=False)
        stockade.run(["true"], granted).check()
        assert ends(made)
        for policy in (Policy(toolchain=False), granted):
            ahead = spare(resident)
            with Sandbox(policy):
                assert named(ahead) == "stockade-gate"

    def test_each_serves_once(self, resident: int, made: int) -> None:
        seen = set()
        look = "readlink /proc/self/ns/net /proc/self/ns/user; ls -A /tmp; touch /tmp/mine"
        for _ in range(4):
            spare(resident)
            seen.add(stockade.run(["sh", "-c", look]).text)
        assert len(seen) == 4 and not any("mine" in text for text in seen)
        assert ends(made)

    @pytest.mark.parametrize(
        "policy", [Policy(limits={"disk": "1M"}), Policy(profile="dev"), Policy(limits={"files": 100})]
    )
    def test_one_that_does_not_suit_is_ended(self, resident: int, made: int, policy: Policy) -> None:
        with Sandbox(policy) as box:
            assert box.run(["df", "/tmp"]).ok
            assert named(made) != "stockade-spare"
        assert ends(made)

    def test_the_next_launch_does_without_one_that_was_killed(self, made: int) -> None:
        kill(made)
        assert stockade.run(["echo", "well"]).text == "well\n"

    def test_it_goes_with_its_gate(self, resident: int, made: int) -> None:
        kill(resident)
        assert ends(made)
        client.shutdown()


def without_devices(text: str) -> str:
    """Without the numbers of anonymous file systems and of groups of mounts."""
    return re.sub(r"\b0:\d+\b|(master|shared):\d+", "", text)


class TestDescriptors:
    """An ordinary user may not look at its gate's descriptors: it lives in a user namespace of its own."""

    def own(self) -> list[str]:
        return descriptors(client._residents["own-network", False].pid)

    def settled(self) -> list[str]:
        time.sleep(0.3)
        return self.own()

    def test_it_has_its_streams_its_socket_and_its_supervisor(self, resident: int) -> None:
        applies(os.geteuid() == 0, "an ordinary user may not look at its gate's descriptors")
        client.shutdown()
        stockade.run(["true"]).check()
        found = [name.partition(":")[0] for name in self.settled()]
        assert found == ["/dev/null", "/dev/null", "/dev/null", "anon_inode", "socket"]

    def test_it_inherits_none_of_the_host_programs(self) -> None:
        applies(os.geteuid() == 0, "an ordinary user may not look at its gate's descriptors")
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            client.shutdown()
            stockade.run(["true"]).check()
            assert [name for name in self.settled() if name.startswith("pipe")] == []
        finally:
            os.close(reader)
            os.close(writer)

    def test_it_does_not_keep_a_host_programs_pipe_open(self) -> None:
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        os.set_blocking(reader, False)
        try:
            client.shutdown()
            with Sandbox() as box:
                box.run(["true"]).check()
                os.close(writer)
                assert os.read(reader, 1) == b"", "the end of the pipe"
        finally:
            os.close(reader)

    def test_the_programs_inside_inherit_none_either(self) -> None:
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_inheritable(end, True)
        try:
            client.shutdown()
            assert stockade.run(["sh", "-c", "ls /proc/self/fd"]).text.split() == ["0", "1", "2", "3"]
        finally:
            os.close(reader)
            os.close(writer)

    def test_two_hundred_launches_leave_it_and_its_supervisor_as_they_were(
        self, resident: int, workspace: Path
    ) -> None:
        policy = Policy(workspace=str(workspace))
        stockade.run(["true"], policy).check()
        time.sleep(0.3)
        ours = len(os.listdir("/proc/self/fd"))
        theirs = len(self.own()) if os.geteuid() == 0 else 0
        for _ in range(100):
            stockade.run(["true"]).check()
            stockade.run(["true"], policy).check()
        assert len(os.listdir("/proc/self/fd")) == ours
        if os.geteuid() == 0:
            assert len(self.settled()) == theirs
        assert client._residents["own-network", False].pid == resident

    def test_refused_launches_leave_it_as_it_was(self, resident: int) -> None:
        applies(os.geteuid() == 0, "an ordinary user may not look at its gate's descriptors")
        time.sleep(0.3)
        before = self.own()
        for data in (b"", bytes(100), bytes(5 << 20)):
            for _ in range(20):
                connection = client.launch(data, (0, 1, 2))
                connection.receive()
                connection.close()
        assert self.settled() == before


def test_a_policy_of_another_profile_gets_its_own_system(tmp_path: Path) -> None:
    """The part of the root that is made ahead is made again when a plan asks for another."""
    listed = {profile: [] for profile in ("strict", "dev")}  # type: dict[str, list[str]]
    for _ in range(3):
        for profile, seen in listed.items():
            seen.append(stockade.run(["ls", "-A", "/etc"], Policy(profile=profile)).check().text)
    for seen in listed.values():
        assert len(set(seen)) == 1
    assert listed["strict"] != listed["dev"]


def test_sandboxes_of_different_profiles_live_side_by_side() -> None:
    with Sandbox(Policy()) as one, Sandbox(Policy(profile="dev")) as other, Sandbox(Policy()) as again:
        before = [box.run(["ls", "-A", "/etc"]).text for box in (one, other, again)]
        stockade.run(["true"], Policy(profile="dev")).check()
        assert [box.run(["ls", "-A", "/etc"]).text for box in (one, other, again)] == before
        assert before[0] == before[2] != before[1]
