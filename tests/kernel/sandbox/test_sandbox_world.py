"""The world inside the strict profile: what a program finds there, and that there is nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.linux.user import Caller
from support.installs import LINKS_INSIDE

PYTHON = "/usr/bin/python3"
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One strict sandbox for all that only looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(tmp_path_factory.mktemp("world") / "state"))
        with Sandbox(Policy(toolchain=False)) as made:
            yield made


def look(box: Sandbox, script: str) -> list[str]:
    return box.run(["sh", "-c", script], timeout=30).check().text.splitlines()


def python(box: Sandbox, script: str) -> str:
    return box.run([PYTHON, "-c", script], timeout=30).check().text


def test_the_root_has_the_system_the_private_directories_and_the_way_to_home(box: Sandbox) -> None:
    system = {"usr", *(name for name in LINKS if os.path.exists(f"/{name}"))}
    home = Caller.current().home.split("/")[1]
    links = {path.split("/")[1] for path in LINKS_INSIDE}
    assert set(look(box, "ls -A /")) == system | {"dev", "etc", "proc", "tmp", "var", home} | links


def test_a_link_of_the_hosts_root_is_the_same_link_inside(box: Sandbox) -> None:
    for name in LINKS:
        if os.path.islink(f"/{name}"):
            assert look(box, f"readlink /{name}") == [os.readlink(f"/{name}")]


def test_home_is_empty_private_and_writable(box: Sandbox) -> None:
    assert look(box, 'ls -A ~; stat -c "%a %u %g" ~') == [f"700 {os.geteuid()} {os.getegid()}"]
    assert stockade.run(["sh", "-c", "echo x > ~/x && cat ~/x"]).text == "x\n"


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm"])
def test_a_shared_directory_is_empty_private_and_sticky(box: Sandbox, path: str) -> None:
    marker = Path(path) / f"stockade-of-the-host-{os.getpid()}"
    marker.touch()
    try:
        assert look(box, f"ls -A {path}; stat -c %a {path}") == ["1777"]
    finally:
        marker.unlink()


def test_var_holds_only_the_way_to_tmp(box: Sandbox) -> None:
    below = Caller.current().home.split("/")
    expected = {"tmp", *([below[2]] if below[1] == "var" else [])}
    assert set(look(box, "ls -A /var")) == expected
    script = "echo x > /var/tmp/x && cat /tmp/x"
    assert stockade.run(["sh", "-c", script], Policy(toolchain=False)).text == "x\n"


@pytest.mark.parametrize(
    "path", ["/", "/usr", "/usr/bin", "/etc", "/dev", "/var", "/proc", "/proc/sys/kernel"]
)
def test_nothing_can_be_made_outside_the_private_directories(box: Sandbox, path: str) -> None:
    result = box.run(["sh", "-c", f"echo x > {path}/stockade-made-this"])
    assert result.exit_code != 0
    assert b"Read-only" in result.stderr or b"denied" in result.stderr or b"nonexistent" in result.stderr
    assert not os.path.exists(f"{path}/stockade-made-this")


def test_a_grant_of_what_the_profile_shows_changes_nothing() -> None:
    """Also with something hidden in it, and with another grant below."""
    policy = Policy(read=["/usr", "/usr/share", "/etc/ssl/certs?"], deny=["/usr/share/doc"])
    assert stockade.run(["sh", "-c", "ls /usr/bin/env; ls /usr/share/doc"], policy).text == "/usr/bin/env\n"


class TestEtc:
    def test_it_has_only_what_the_profile_names(self, box: Sandbox) -> None:
        from stockade.policy.profile import profile

        made = {"passwd", "group", "hostname", "hosts", "resolv.conf", "nsswitch.conf"}
        taken = {entry.removesuffix("?").split("/")[0] for entry in profile("strict").etc}
        found = set(look(box, "ls -A /etc"))
        assert made <= found <= made | taken

    @pytest.mark.parametrize(
        "name", ["shadow", "gshadow", "sudoers", "sudoers.d", "ssh", "machine-id", "fstab", "ssl/private"]
    )
    def test_what_is_secret_on_the_host_is_absent(self, box: Sandbox, name: str) -> None:
        assert look(box, f"test -e /etc/{name} || echo absent") == ["absent"]

    def test_passwd_knows_the_caller_and_nobody(self, box: Sandbox) -> None:
        caller = Caller.current()
        lines = [line.split(":") for line in look(box, "cat /etc/passwd")]
        assert [line[0] for line in lines] == [caller.user, "nobody"]
        assert lines[0][2:4] == [str(caller.uid), str(caller.gid)]
        assert lines[0][5] == caller.home

    def test_group_knows_the_callers_and_nogroup(self, box: Sandbox) -> None:
        caller = Caller.current()
        lines = [line.split(":") for line in look(box, "cat /etc/group")]
        assert [(line[0], line[2]) for line in lines] == [
            (caller.group, str(caller.gid)),
            ("nogroup", "65534"),
        ]

    def test_the_machine_has_another_name(self, box: Sandbox) -> None:
        assert look(box, "cat /etc/hostname; uname -n") == ["stockade", "stockade"]

    def test_certificates_are_there_where_the_host_has_them(self, box: Sandbox) -> None:
        from support.means import need

        bundle = "/etc/ssl/certs/ca-certificates.crt"
        need(os.path.exists(bundle), f"{bundle} is not on this host")
        assert look(box, f"grep -c BEGIN {bundle}")[0] != "0"


class TestDevices:
    def test_there_are_exactly_the_harmless_ones(self, box: Sandbox) -> None:
        nodes = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
        links = {"fd", "stdin", "stdout", "stderr"}
        assert set(look(box, "ls -A /dev")) == nodes | links | {"pts", "shm"}

    def test_they_work(self, box: Sandbox) -> None:
        script = """
            echo x > /dev/null
            head -c 3 /dev/zero | od -An -tx1
            (echo x > /dev/full) 2>/dev/null || echo full
            head -c 8 /dev/urandom | wc -c
            head -c 8 /dev/random | wc -c
            echo through > /dev/stdout
        """
        assert look(box, script) == [" 00 00 00", "full", "8", "8", "through"]

    def test_a_pseudo_terminal_can_be_opened(self, box: Sandbox) -> None:
        script = "import os; a, b = os.openpty(); os.write(b, b'x'); print(os.ttyname(b), os.read(a, 1))"
        assert python(box, script).startswith("/dev/pts/0 b'x'")

    def test_none_can_be_made(self, box: Sandbox) -> None:
        result = box.run(["mknod", "/tmp/disk", "b", "8", "0"])
        assert result.exit_code != 0
        assert look(box, "ls -A /tmp") == []

    def test_the_hosts_nodes_cannot_be_changed(self, box: Sandbox) -> None:
        assert box.run(["chmod", "600", "/dev/null"]).exit_code != 0


class TestProcesses:
    def test_only_its_own_are_seen(self, box: Sandbox) -> None:
        code = "import os; print({n for n in os.listdir('/proc') if n.isdigit()} - {str(os.getpid())})"
        assert python(box, code) == "{'1'}\n"

    def test_the_gate_cannot_be_read(self, box: Sandbox) -> None:
        for name in ("environ", "mem", "maps", "auxv", "stack", "syscall", "root/", "cwd/", "exe"):
            assert box.run(["cat", f"/proc/1/{name}"]).stdout == b"", name
            assert box.run(["ls", "-L", f"/proc/1/{name}"]).stdout in (b"", f"/proc/1/{name}\n".encode()), (
                name
            )

    def test_the_gates_descriptors_cannot_be_followed(self, box: Sandbox) -> None:
        script = (
            "import os\n"
            "for number in range(256):\n"
            "    for how in (os.readlink, os.stat, lambda path: os.open(path, os.O_PATH)):\n"
            "        try: print(number, how(f'/proc/1/fd/{number}'))\n"
            "        except OSError: pass\n"
        )
        assert python(box, script) == ""

    def test_proc_is_read_only(self, box: Sandbox) -> None:
        for path in ("/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/proc/sysrq-trigger"):
            result = box.run(["sh", "-c", f"echo 1 > {path}"])
            assert result.exit_code != 0, path

    def test_a_program_leads_a_session_without_a_terminal(self, box: Sandbox) -> None:
        script = "import os; print(os.getsid(0) == os.getpid()); os.open('/dev/tty', os.O_RDWR)"
        result = box.run([PYTHON, "-c", script])
        assert result.text == "True\n" and b"No such device" in result.stderr

    def test_every_signal_has_its_default_effect_and_none_is_blocked(self, box: Sandbox) -> None:
        status = box.run(["cat", "/proc/self/status"]).text.splitlines()
        found = [line.split()[1] for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
        assert found == ["0" * 16] * 3

    def test_it_inherits_no_descriptor(self, box: Sandbox) -> None:
        assert (
            python(box, "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))") == "[0, 1, 2, 3]\n"
        )

    def test_the_host_cannot_be_signalled(self, box: Sandbox) -> None:
        assert box.run(["kill", "-0", str(os.getpid())]).exit_code != 0


class TestIdentity:
    def test_the_user_and_group_are_the_callers(self, box: Sandbox) -> None:
        assert look(box, "id -u; id -g; id -un") == [
            str(os.geteuid()),
            str(os.getegid()),
            Caller.current().user,
        ]

    def test_there_are_no_further_groups(self, box: Sandbox) -> None:
        groups = python(box, "import os; print(*os.getgroups())").split()
        assert set(groups) <= {str(os.getegid())}

    def test_there_is_no_capability(self, box: Sandbox) -> None:
        found = look(box, "grep ^Cap /proc/self/status")
        assert len(found) == 5 and {line.split()[1] for line in found} == {"0" * 16}

    def test_no_new_privileges_can_be_had(self, box: Sandbox) -> None:
        assert look(box, "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status") == [
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ]

    def test_a_set_user_id_program_stays_the_caller(self, box: Sandbox) -> None:
        assert b"nosuid" in box.run(["grep", " /usr ", "/proc/self/mountinfo"]).stdout


SERVE = """
import socket, threading
server = socket.create_server(("{address}", 0), family=socket.{family})
def answer():
    peer, _ = server.accept()
    peer.sendall(peer.recv(10).upper())
    peer.close()
threading.Thread(target=answer).start()
with socket.create_connection(server.getsockname()[:2], timeout=5) as client:
    client.sendall(b"hello")
    print(client.recv(10).decode())
"""


class TestNetwork:
    @pytest.mark.parametrize(("address", "family"), [("127.0.0.1", "AF_INET"), ("::1", "AF_INET6")])
    def test_a_server_and_its_client_meet_on_loopback(self, box: Sandbox, address: str, family: str) -> None:
        assert python(box, SERVE.format(address=address, family=family)) == "HELLO\n"

    def test_localhost_is_found(self, box: Sandbox) -> None:
        assert python(box, "import socket; print(socket.gethostbyname('localhost'))") == "127.0.0.1\n"

    def test_loopback_is_the_only_interface(self, box: Sandbox) -> None:
        assert python(box, "import socket; print([name for _, name in socket.if_nameindex()])") == "['lo']\n"

    @pytest.mark.parametrize("address", ["192.0.2.1", "8.8.8.8", "2001:db8::1"])
    def test_no_other_address_is_reached(self, box: Sandbox, address: str) -> None:
        script = f"import socket; socket.create_connection(({address!r}, 80), timeout=5)"
        began = time.monotonic()
        result = box.run([PYTHON, "-c", script], timeout=30)
        assert b"Network is unreachable" in result.stderr
        assert time.monotonic() - began < 4

    def test_a_server_of_the_host_is_not_reached(self, box: Sandbox) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            script = f"import socket; socket.create_connection({address}, timeout=5)"
            assert b"Connection refused" in box.run([PYTHON, "-c", script]).stderr

    def test_a_name_is_not_found_at_once(self, box: Sandbox) -> None:
        script = (
            "import socket, time\n"
            "began = time.monotonic()\n"
            "try: socket.getaddrinfo('example.com', 80)\n"
            "except socket.gaierror: print(time.monotonic() - began)\n"
        )
        assert float(python(box, script)) < 1.0

    def test_every_sandbox_has_a_network_of_its_own(self, box: Sandbox) -> None:
        script = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
        with Sandbox() as other:
            assert (
                len({python(box, script), python(other, script), f"{os.stat('/proc/self/ns/net').st_ino}\n"})
                == 3
            )
