"""One policy, every backend, the same behaviour: or the control is not offered and the run is refused.

Each test runs on each backend. What they ask is what the native backend does;
where another cannot do it, its table of controls says so, and a policy that
needs it is refused there. The policies accept what the weakest backend has
only in part, which changes nothing on those that have it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, UnsupportedError, backends
from stockade.backends.selection import select
from stockade.controls import Control
from stockade.host import CGROUP_PROBES, Host, host
from stockade.linux import cgroups
from stockade.runs import prepare
from stockade.runs.register import register
from support.marks import MARK, gone, marked
from support.means import applies, need
from support.paths import ROOT

PYTHON = "/usr/bin/python3"
UNIFIED = "/sys/fs/cgroup/unified"
#: What the weakest of them has in part.
IN_PART = ("files", "processes", "devices")
TABLE = tomllib.loads((ROOT / "tests/fixtures/golden/controls.toml").read_text())
WHO = "root" if os.geteuid() == 0 else "user"
REFUSALS = ("ENOENT", "EACCES", "EPERM", "EROFS", "EXDEV", "ENOTSUP")


@pytest.fixture(params=backends.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    # That one runs at all says its table, in the first test; here it is only looked for.
    offers = backends.load(name).offers(host(helpers=True))
    need(offers[Control.SYSCALLS].available, f"the {name} backend does not work here")
    return name


#: What the gate does for the maker of its namespaces, and attacks that test_every_backend.py has too.
#: Behind bubblewrap it is the same gate: test_bwrap.py beside this file has it in one sandbox.
not_behind_bubblewrap = pytest.mark.parametrize(
    "backend", [name for name in backends.BACKENDS if name != "bwrap"], indirect=True
)


def policy(backend: str, **clauses: Any) -> Policy:
    return Policy(backend=backend, accept=IN_PART, **clauses)


def offers(backend: str, *controls: str) -> bool:
    table = backends.load(backend).offers(host(helpers=True))
    return all(table[Control(control)].available for control in controls)


def sh(backend: str, script: str, *, timeout: float = 20, **clauses: Any) -> stockade.Result:
    return stockade.run(["sh", "-c", script], policy(backend, **clauses), timeout=timeout, grace=0.2)


def py(backend: str, code: str, *arguments: str, **clauses: Any) -> str:
    """What a program prints that tries something and says how that was answered."""
    need(os.path.exists(PYTHON), f"{PYTHON} is not installed")
    result = stockade.run(
        [PYTHON, "-I", "-c", TRY + code, *arguments], policy(backend, **clauses), timeout=20
    )
    assert result.exit_code == 0, result.stderr.decode()
    return result.text.strip()


TRY = """
import errno, os, socket, sys
def tried(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
"""


class TestWhatIsOffered:
    @pytest.mark.parametrize("name", backends.BACKENDS)
    def test_no_control_is_lost(self, name: str) -> None:
        applies(WHO == "root" or not host().has("cgroup.pids"), "the table is of a user without cgroups")
        found = {
            control.value
            for control, offer in backends.load(name).offers(host(helpers=True)).items()
            if offer.available
        }
        lost = set(TABLE[name][WHO]) - found
        need(not lost, f"{name} does not enforce here: {', '.join(sorted(lost))}")
        assert found - set(TABLE[name][WHO]) == set(), "they belong into the table"

    def test_every_backend_has_its_row(self) -> None:
        assert set(TABLE) == set(backends.BACKENDS)

    @pytest.mark.parametrize("name", backends.BACKENDS)
    def test_what_is_not_offered_is_refused_with_the_reason(self, name: str, workspace: Path) -> None:
        asking: dict[str, dict[str, Any]] = {
            "deny": {"deny": [str(workspace / "x")]},
            "protect": {"workspace": {"path": str(workspace), "mode": "rw"}, "protect": [".git/hooks"]},
            "exec": {"exec": ["/usr/bin/*"]},
            "workspace.overlay": {"workspace": str(workspace)},
            "limits.disk": {"limits": {"disk": "1M"}},
            "limits.memory": {"limits": {"memory": "64M"}},
            "files": {},
            "processes": {},
            "devices": {},
        }
        table = backends.load(name).offers(host(helpers=True))
        (workspace / ".git/hooks").mkdir(parents=True)
        for control, clauses in asking.items():
            accept = [part for part in IN_PART if part != control]
            wanted = Policy(backend=name, accept=accept, **clauses)
            if table[Control(control)].available:
                stockade.run(["true"], wanted, on_exit="discard").check()
                continue
            with pytest.raises(UnsupportedError) as refused:
                stockade.run(["true"], wanted)
            assert set(refused.value.missing) == {name}
            assert table[Control(control)].reason in refused.value.message

    def test_a_backend_of_another_system_is_an_error_with_its_reason(self) -> None:
        for name in backends.BACKENDS:
            with pytest.raises(UnsupportedError, match=f"the {name} backend needs Linux, this is macOS"):
                select(Policy(backend=name), Host.pretend(system="darwin"))

    def test_one_that_cannot_be_used_is_an_error_with_the_probes_reason(self) -> None:
        weak = Host.pretend(without=("userns",))
        with pytest.raises(UnsupportedError, match=r"native misses .*: no userns"):
            select(policy("native"), weak)
        assert select(Policy(accept=IN_PART), weak).backend == "bwrap"
        weaker = Host.pretend(without=("userns", "bwrap"))
        assert select(Policy(accept=IN_PART), weaker).backend == "landlock"

    def test_the_order_of_preference_decides_between_equals(self) -> None:
        assert select(Policy(accept=IN_PART), Host.pretend()).backend == "native"
        assert select(policy("landlock"), Host.pretend()).backend == "landlock"
        both = Policy(backend=["landlock", "native"], net="open", accept=IN_PART)
        # The fewest weaker controls first, whatever the order.
        assert select(both, Host.pretend()).backend == "native"
        assert select(Policy(backend=["bwrap", "native"]), Host.pretend()).backend == "bwrap"
        only = Policy(backend=["landlock", "native"], accept=IN_PART)
        assert select(only, Host.pretend(without=("userns",))).backend == "landlock"
        with pytest.raises(PolicyError):
            Policy(backend=[])
        with pytest.raises(PolicyError, match="is not a known value"):
            Policy(backend=["native", "no-such"])


class TestARun:
    @not_behind_bubblewrap
    def test_streams_and_exit_code(self, backend: str) -> None:
        data = os.urandom(300_000)
        command = ["sh", "-c", "cat; echo problem >&2; exit 7"]
        result = stockade.run(command, policy(backend), input=data, timeout=20)
        assert (result.outcome, result.exit_code) == ("exited", 7)
        assert (result.stdout, result.stderr) == (data, b"problem\n")

    @not_behind_bubblewrap
    def test_every_way_to_end(self, backend: str, workspace: Path) -> None:
        (workspace / "plain").write_text("x")
        wanted = policy(backend, write=[str(workspace)])

        def ends(*command: str, timeout: float = 20, cwd: str | None = None) -> tuple[str, int]:
            result = stockade.run(list(command), wanted, timeout=timeout, grace=0.2, cwd=cwd)
            return result.outcome, result.exit_code

        assert ends("true") == ("exited", 0)
        assert ends("sh", "-c", "kill -SEGV $$") == ("signalled", 128 + signal.SIGSEGV)
        assert ends("sleep", "60", timeout=0.2) == ("timed-out", 124)
        assert ends("no-such-command") == ("setup-failed", 127)
        assert ends(str(workspace / "plain")) == ("denied", 126)
        assert ends("true", cwd="/no/such/directory") == ("setup-failed", 125)
        assert ends("true", cwd="/var/spool") == ("setup-failed", 125)
        assert ends("true", cwd="/proc/self/root") == ("setup-failed", 125)

    def test_what_was_enforced_is_told_for_every_control(self, backend: str) -> None:
        result = stockade.run(["true"], policy(backend))
        assert set(result.controls) == set(policy(backend).controls())
        assert all(one.mechanism and one.observed for one in result.controls.values())
        weaker = {name for name, one in result.controls.items() if one.observed == "accepted weaker"}
        assert weaker == {name for name in result.controls if not offers(backend, name)}

    def test_the_plan_is_known_before_and_is_the_same_every_time(self, backend: str, workspace: Path) -> None:
        wanted = policy(backend, read=[str(workspace)])
        prepared = prepare.prepare(wanted, dry=True, command=["true"])
        prepared.close(discard=True)
        assert prepared.plan.backend == backend
        assert all(op.describe() and op.clause for op in prepared.plan.ops)
        assert {stockade.run(["true"], wanted).plan for _ in range(2)} == {prepared.plan.hash}

    def test_the_environment_is_built_anew(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
        monkeypatch.setenv("PASSED", "yes")
        result = sh(backend, "env; pwd", env={"GIVEN": "1"}, pass_env=["PASSED"])
        assert "SECRET" not in result.text and "GIVEN=1\n" in result.text and "PASSED=yes\n" in result.text

    def test_there_is_a_private_home_and_a_place_for_temporary_files(self, backend: str) -> None:
        script = 'ls -A ~; [ "$PWD" = "$HOME" ] && echo x > ~/a && rm $(mktemp) && ls -A ~'
        first, second = sh(backend, script), sh(backend, script)
        assert (first.exit_code, first.text, second.text) == (0, "a\n", "a\n"), first.stderr

    @not_behind_bubblewrap
    def test_output_beyond_the_limit_goes_to_a_file(self, backend: str) -> None:
        result = sh(backend, "head -c 100000 /dev/zero", limits={"output": "10K"})
        assert result.truncated and len(result.stdout) <= 10240
        [spilled] = result.spilled
        assert os.path.getsize(spilled.path) + len(result.stdout) >= 100_000
        os.unlink(spilled.path)


class TestFiles:
    READ = "print(*(tried(os.open, path, os.O_RDONLY) for path in sys.argv[1:]))"
    CHANGE = """
path = sys.argv[1]
print(*[
    tried(os.open, path, os.O_WRONLY), tried(os.truncate, path, 0), tried(os.chmod, path, 0o777),
    tried(os.chown, path, os.getuid(), os.getgid()), tried(os.utime, path, (1, 1)),
    tried(os.setxattr, path, "user.x", b"x"), tried(os.unlink, path), tried(os.rename, path, path + ".x"),
    tried(os.link, path, path + ".y"), tried(os.symlink, path, path + ".z"), tried(os.mkdir, path + ".d"),
    tried(os.mkfifo, path + ".f"), tried(lambda: open(path + ".n", "x")),
])
"""

    def test_what_is_not_granted_cannot_be_opened(self, backend: str, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        own = f"/proc/{os.getpid()}"
        paths = [
            str(tmp_path / "secret"),
            str(tmp_path),
            "/etc/shadow",
            f"{own}/environ",
            f"{own}/cmdline",
            "/sys",
        ]
        assert set(py(backend, self.READ, *paths).split()) <= set(REFUSALS)
        (tmp_path / "granted").mkdir()
        (tmp_path / "granted/link").symlink_to(tmp_path / "secret")
        link = str(tmp_path / "granted/link")
        assert py(backend, self.READ, link, write=[str(tmp_path / "granted")]) in REFUSALS

    @pytest.mark.parametrize("how", ["not at all", "read", "ro"])
    def test_what_is_not_writable_cannot_be_changed(self, backend: str, tmp_path: Path, how: str) -> None:
        granted = tmp_path / "granted"
        granted.mkdir()
        (granted / "file").write_text("content")
        before = os.stat(granted / "file").st_ctime_ns
        rule: dict[str, Any] = {"workspace": {"path": str(granted), "mode": "ro"}, "protect": []}
        clauses = {"read": {"read": [str(granted)]}, "ro": rule}.get(how, {})
        answers = py(backend, self.CHANGE, str(granted / "file"), **clauses).split()
        assert set(answers) <= set(REFUSALS), answers
        assert (granted / "file").read_text() == "content" and os.listdir(granted) == ["file"]
        assert os.stat(granted / "file").st_ctime_ns == before

    @pytest.mark.parametrize("how", ["write", "rw"])
    def test_what_is_writable_is_the_hosts(self, backend: str, workspace: Path, how: str) -> None:
        (workspace / "old").write_text("old")
        rule: dict[str, Any] = {"workspace": {"path": str(workspace), "mode": "rw"}, "protect": []}
        clauses = {"write": [str(workspace)]} if how == "write" else rule
        script = (
            f"cd {workspace} && cat old && echo new > old && mkdir -p a/b && mv old a/b && touch c a/b/old "
            "&& ln -s a/b/old l && ln c d && rm c && cat l && echo 'echo run' > x && sh x"
        )
        result = sh(backend, script, **clauses)
        assert (result.exit_code, result.text) == (0, "oldnew\nrun\n"), result.stderr
        assert (workspace / "a/b/old").read_text() == "new\n"
        assert sorted(os.listdir(workspace)) == ["a", "d", "l", "x"]

    @not_behind_bubblewrap
    def test_no_device_can_be_made_or_reached(self, backend: str, workspace: Path) -> None:
        code = "print(tried(os.mknod, sys.argv[1] + '/d', 0o20600, 0x103), tried(os.open, '/dev/mem', 0))"
        answers = py(backend, code, str(workspace), write=[str(workspace)]).split()
        assert set(answers) <= set(REFUSALS)

    def test_the_file_api_sees_the_workspace_as_the_program_does(self, backend: str, workspace: Path) -> None:
        (workspace / "out").symlink_to("/etc/shadow")
        wanted = policy(backend, workspace={"path": str(workspace), "mode": "rw"}, protect=[])
        with Sandbox(wanted) as box:
            box.files.write("greeting", "hello")
            assert box.run(["cat", "greeting"]).text == "hello"
            box.run(["sh", "-c", "echo from inside > b"]).check()
            assert box.files.read("b") == b"from inside\n"
            assert [info.path for info in box.files.list()] == [
                f"{workspace}/{n}" for n in ("b", "greeting", "out")
            ]
            with pytest.raises(stockade.StockadeError):
                box.files.read("out")
            with pytest.raises(stockade.StockadeError):
                box.files.read("/etc/shadow")


class TestNetworkAndIpc:
    def test_nothing_of_the_host_is_reached(self, backend: str, tmp_path: Path) -> None:
        code = """
def reach(family, kind, address):
    with socket.socket(family, kind) as end:
        end.settimeout(2)
        end.connect(address)
        end.send(b"x")
port, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print(*[
    tried(reach, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    tried(reach, socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 53)),
    tried(reach, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
    tried(reach, socket.AF_UNIX, socket.SOCK_STREAM, path),
    tried(reach, socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + name),
    tried(reach, socket.AF_PACKET, socket.SOCK_RAW, ("lo", 0)),
])
"""
        import socket

        directory = tmp_path / "g"
        directory.mkdir()
        name = f"stockade-test-{os.getpid()}"
        with socket.socket() as tcp, socket.socket(1) as unix, socket.socket(1) as abstract:
            tcp.bind(("127.0.0.1", 0))
            unix.bind(str(directory / "s"))
            abstract.bind(f"\0{name}")
            for end in (tcp, unix, abstract):
                end.listen(1)
                end.setblocking(False)
            port = str(tcp.getsockname()[1])
            answers = py(backend, code, port, str(directory / "s"), name, read=[str(directory)]).split()
            assert "ok" not in answers and len(answers) == 6, answers
            for end in (tcp, unix, abstract):
                with pytest.raises(BlockingIOError):
                    end.accept()

    def test_an_open_network_is_the_hosts(self, backend: str) -> None:
        import socket

        code = "end = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('reached')"
        with socket.socket() as tcp:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen(1)
            assert py(backend, code, str(tcp.getsockname()[1]), net="open") == "reached"

    @not_behind_bubblewrap
    def test_pairs_of_sockets_serve_the_program_itself(self, backend: str) -> None:
        assert py(backend, "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))") == "b'x'"


class TestProcesses:
    @not_behind_bubblewrap
    def test_a_process_outside_can_be_neither_signalled_nor_limited(self, backend: str) -> None:
        code = """
import resource
pid = int(sys.argv[1])
print(*[
    tried(os.kill, pid, 0), tried(os.kill, pid, 9), tried(os.kill, -1, 9),
    tried(resource.prlimit, pid, resource.RLIMIT_NOFILE, (0, 0)), tried(os.setpriority, 0, pid, 19),
    tried(os.sched_setaffinity, pid, {0}), tried(os.open, f"/proc/{pid}/environ", 0),
])
"""
        with subprocess.Popen(["sleep", "60"]) as victim:
            try:
                answers = py(backend, code, str(victim.pid)).split()
                assert victim.poll() is None
            finally:
                victim.kill()
        assert answers.pop(2) in ("ok", "ESRCH")
        assert "ok" not in answers, answers

    @not_behind_bubblewrap
    def test_no_privilege_is_left_or_gained(self, backend: str) -> None:
        code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
other = tried(os.setuid, os.getuid() + 1)
print(sum(data[:2]), sum(data[3:5]), libc.prctl(39, 0, 0, 0, 0), os.getuid(), other)
"""
        *found, other = py(backend, code).split()
        assert found == ["0", "0", "1", str(os.getuid())] and other in ("EPERM", "EINVAL")

    @not_behind_bubblewrap
    def test_exactly_three_descriptors_come_in(self, backend: str) -> None:
        code = "print(*[n for n in range(256) if tried(os.fstat, n) == 'ok'])"
        leaked = os.open("/", os.O_RDONLY)
        os.set_inheritable(leaked, True)
        try:
            assert py(backend, code) == "0 1 2"
        finally:
            os.close(leaked)

    @not_behind_bubblewrap
    def test_no_terminal_controls_it_and_nothing_is_typed(self, backend: str) -> None:
        code = """
import fcntl
print(tried(os.open, '/dev/tty', os.O_RDWR), tried(fcntl.ioctl, 0, 0x5412, b'x'), os.getsid(0) == os.getpid())
"""
        assert py(backend, code) == "ENXIO EPERM True"


#: In a session of its own and orphaned; only KILL ends it.
DAEMON = f"(setsid sh -c 'trap \"\" TERM HUP INT; echo >up; sleep 60; :' {MARK} >/dev/null 2>&1 &)"
STARTS_ONE = f"cd; {DAEMON}; until [ -e up ]; do sleep 0.01; done; rm up"


class TestCleanup:
    def test_nothing_outlives_a_run(self, backend: str) -> None:
        assert sh(backend, f"{STARTS_ONE}; {STARTS_ONE}; echo done").text == "done\n"
        assert marked() == []

    @not_behind_bubblewrap
    def test_nothing_outlives_a_run_whose_time_is_over(self, backend: str) -> None:
        assert sh(backend, f"{STARTS_ONE}; sleep 60", timeout=1.5).outcome == "timed-out"
        assert marked() == []

    @pytest.mark.usefixtures("swept")
    @pytest.mark.parametrize("how", ["one run", "living"])
    def test_nothing_outlives_a_killed_supervisor(self, backend: str, how: str) -> None:
        code = (
            "import sys, stockade\n"
            f"policy = stockade.Policy(backend={backend!r}, accept={IN_PART!r})\n"
            "if sys.argv[1] == 'living':\n"
            "    box = stockade.Sandbox(policy)\n"
            "    box.open()\n"
            "    run = box.run\n"
            "else:\n"
            "    run = lambda command, **options: stockade.run(command, policy, **options)\n"
            f"command = ['sh', '-c', {STARTS_ONE + '; echo up; sleep 60'!r}]\n"
            "run(command, grace=0.2, on_stdout=lambda _: print('up', flush=True))\n"
        )
        with subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE) as supervisor:
            assert supervisor.stdout is not None and supervisor.stdout.readline() == b"up\n"
            assert marked()
            supervisor.kill()
        assert gone(8)

    def test_a_fork_bomb_is_ended_with_its_run(self, backend: str) -> None:
        applies(offers(backend, "limits.tasks"), "no task limit for this user")
        bomb = f"bomb() {{ bomb | bomb & }}; bomb; sleep 60 {MARK}"
        script = f"sh -c '{bomb}' {MARK}"
        result = sh(backend, script, timeout=0.5, limits={"tasks": 40})
        assert result.outcome in ("timed-out", "exited")
        assert gone()


class TestALivingSandbox:
    def test_runs_share_files_and_what_they_leave_behind(self, backend: str) -> None:
        with Sandbox(policy(backend)) as box:
            box.run(["sh", "-c", "echo 1 > ~/x"]).check()
            assert box.run(["sh", "-c", "cat ~/x"]).text == "1\n"
            assert box.run(["sh", "-c", f"{STARTS_ONE}; echo left"]).text == "left\n"
            assert marked(), "what a run leaves belongs to the sandbox"
            assert box.run(["sh", "-c", "exit 5"]).exit_code == 5
        assert gone()

    @not_behind_bubblewrap
    def test_ending_one_run_leaves_the_others_alone(self, backend: str) -> None:
        with Sandbox(policy(backend)) as box, box.start(["cat"], stdin=subprocess.PIPE) as other:
            assert (
                box.run(["sh", "-c", f"{STARTS_ONE}; sleep 60"], timeout=1.5, grace=0.2).outcome
                == "timed-out"
            )
            assert gone()
            assert other.stdin is not None and other.stdout is not None
            other.stdin.write(b"still here\n")
            assert other.stdout.readline() == b"still here\n"
            other.kill(0)
            assert other.wait(10).outcome == "cancelled"

    @not_behind_bubblewrap
    def test_runs_go_on_at_the_same_time(self, backend: str) -> None:
        with Sandbox(policy(backend)) as box:
            found: list[str] = []
            threads = [
                threading.Thread(target=lambda n=n: found.append(box.run(["echo", str(n)]).text))
                for n in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(found) == [f"{n}\n" for n in range(6)]

    @not_behind_bubblewrap
    def test_everything_inside_can_be_held_and_let_go(self, backend: str) -> None:
        with Sandbox(policy(backend)) as box, box.start(["sh", "-c", "echo up; exec sleep 60"]) as process:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            box.pause()
            pid = process.pid

            def state() -> str:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

            end = time.monotonic() + 5
            while state() != "T" and time.monotonic() < end:
                time.sleep(0.01)
            assert state() == "T"
            box.resume()
            while state() == "T" and time.monotonic() < end:
                time.sleep(0.01)
            assert state() != "T"
            process.kill(0)
            process.wait(10)

    @not_behind_bubblewrap
    def test_a_program_can_have_a_terminal(self, backend: str) -> None:
        with (
            Sandbox(policy(backend)) as box,
            box.start(["sh", "-c", "stty size; read x; echo got $x >/dev/tty"], pty=(7, 9)) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"7 9\r\n"
            process.stdin.write(b"mine\n")
            assert b"got mine" in process.stdout.read()
            assert process.wait(10).ok

    def test_it_is_listed_and_can_be_ended_by_others(self, backend: str, stockade_home: Path) -> None:
        with Sandbox(policy(backend)) as box, box.start(["sh", "-c", "sleep 60; :", MARK]) as process:
            while not marked():
                time.sleep(0.01)
            [record] = register.living(str(stockade_home))
            register.stop(str(stockade_home), record, now=False)
            assert process.wait(10).outcome == "cancelled"
            assert gone()


#: Says how many it could start; they wait until it ends.
BOMB = """
import os
reader, writer = os.pipe()
count = 0
try:
    while os.fork():
        count += 1
    os.close(writer)
    os.read(reader, 1)
except OSError:
    print(count)
"""


class TestLimits:
    @not_behind_bubblewrap
    def test_descriptors(self, backend: str) -> None:
        code = "print(tried(lambda: [os.dup(1) for _ in range(100)]))"
        assert py(backend, code, limits={"files": 64}) == "EMFILE"

    def test_memory_of_everything_together(self, backend: str) -> None:
        applies(host().has("cgroup.memory"), "no memory cgroup for this user")
        code = "x = bytearray(200 << 20)"
        command = [PYTHON, "-I", "-c", code]
        result = stockade.run(command, policy(backend, limits={"memory": "64M"}), timeout=20)
        assert (result.outcome, result.exit_code) == ("out-of-memory", 137)

    def test_processor_time_and_tasks(self, backend: str) -> None:
        applies(all(host().has(name) for name in CGROUP_PROBES), "no cgroups for this user")
        limits = {"cpu_time": "300ms", "tasks": 12, "cpu": 1}
        with Sandbox(policy(backend, limits=limits)) as box:
            assert 5 < int(box.run([PYTHON, "-I", "-c", BOMB], timeout=20).text) < 12
            result = box.run(["sh", "-c", "while :; do :; done"], timeout=20)
        assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)

    def test_a_cgroup_of_version_2_is_entered_as_well(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here it counts processor time and has no controllers; the others stay where they are."""
        applies(os.geteuid() == 0, "for root only")
        need(os.path.exists(f"{UNIFIED}/cgroup.procs"), "version 2 is not mounted beside version 1")
        found = cgroups.CgroupParents(
            found={**cgroups.places().found, "cpuacct": cgroups.CgroupParent(UNIFIED, 2)}
        )
        monkeypatch.setattr(cgroups, "places", lambda: found)
        # What is kept is remembered.
        limits = {"cpu_time": f"{310 + list(backends.BACKENDS).index(backend)}ms"}
        result = stockade.run(["sh", "-c", "while :; do :; done"], policy(backend, limits=limits), timeout=20)
        assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)
        assert result.usage.source["cpu"] == "cgroup"


@not_behind_bubblewrap
def test_a_session_stays_and_is_interrupted(backend: str) -> None:
    with stockade.Sandbox(policy(backend)) as box, box.shell() as shell:
        shell.run("X=kept")
        result = shell.run("sleep 60", timeout=0.3, grace=20)
        assert result.outcome == "timed-out" and result.usage.wall < 10
        assert shell.run("exit 3").exit_code == 3 and shell.run("echo $X").text == "kept\n"
