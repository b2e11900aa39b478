"""What the whole machine shares, or no limit counts, cannot be had from inside. Threat 60.

Each attack asks for very little and gives it back at once: nothing of the machine is used up by these tests.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import selectors
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import AsyncSandbox, Policy, PolicyError, SetupError, backends
from stockade.bench.backend_costs import usable
from stockade.gate import client
from stockade.host import host
from stockade.host.advice import UNTRANSLATED
from support import bubblewraps
from support.means import applies, clauses_for, need, need_program


@pytest.fixture(params=list(backends.BACKENDS))
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The clauses of a policy for one backend, with what it has only in part accepted."""
    return clauses_for(request.param)


def alone(walls: dict[str, Any]) -> bool:
    return bool(walls["backend"] == "landlock")


def test_no_filter_of_system_calls_is_loaded(walls: dict[str, Any]) -> None:
    """The answers are those of a kernel without them, so that programs go on without."""
    assert inside("budgets", "filters", **walls) == {
        "seccomp": "ENOSYS", "listener": "ENOSYS", "listener, high": "ENOSYS",
        "prctl": "EINVAL", "prctl, high": "EINVAL",
    }  # fmt: skip
    assert set(outside("budgets", "filters").values()) == {"ok"}


def test_a_policy_can_allow_filters_and_never_one_that_outlives_its_process(walls: dict[str, Any]) -> None:
    assert inside("budgets", "filters", syscalls={"allow": ["seccomp"]}, **walls) == {
        "seccomp": "ok", "listener": "EPERM", "listener, high": "EPERM", "prctl": "ok", "prctl, high": "ok",
    }  # fmt: skip


def test_no_filter_is_loaded_for_a_socket(walls: dict[str, Any]) -> None:
    """They are translated into the same memory: 14,308 of them used up all that this kind of machine has."""
    refused = {"filter": "ENOPROTOOPT", "harmless": "ok"}
    assert inside("budgets", "socket filters", **walls) == refused
    assert inside("budgets", "socket filters", syscalls={"allow": ["seccomp"]}, **walls) == refused
    assert outside("budgets", "socket filters") == {"filter": "ok", "harmless": "ok"}
    assert (
        inside("budgets", "port filters", **walls, **({"net": "open"} if alone(walls) else {}))
        == "ENOPROTOOPT"
    )
    assert outside("budgets", "port filters") == "ok"


def test_huge_pages_cannot_be_had(walls: dict[str, Any]) -> None:
    assert inside("budgets", "huge pages", **walls) == {
        "mmap": "ENOMEM", "mmap, high": "ENOMEM", "memfd": "EPERM", "shm": "EPERM"
    }  # fmt: skip
    control = outside("budgets", "huge pages")
    applies(control["mmap"] == "ok", "refused inside; this kernel has no huge pages to show outside")
    assert control["mmap, high"] == control["memfd"] == "ok"
    assert control["shm"] == "ok" or not arena.IS_ROOT


def test_huge_pages_cannot_be_had_where_programs_are_listed() -> None:
    listed = inside("budgets", "huge pages", exec=[arena.PYTHON])
    assert set(listed.values()) == {"ENOMEM", "EPERM"}


def test_the_map_of_all_memory_is_not_split(walls: dict[str, Any]) -> None:
    assert inside("budgets", "secret memory", **walls) == "ENOSYS"
    control = outside("budgets", "secret memory")
    applies(control != "ENOSYS", "refused inside; this kernel has no secret memory to show outside")
    assert control == "ok"
    with pytest.raises(PolicyError, match="memfd_secret"):
        inside("budgets", "secret memory", syscalls={"allow": ["memfd_secret"]}, **walls)


def test_a_file_that_can_only_be_read_keeps_its_hint(walls: dict[str, Any], granted: Path) -> None:
    path = str(granted / "file")
    assert inside("budgets", "hint", path, read=[str(granted)], **walls) == "EINVAL"
    assert outside("budgets", "hint", path) == "ok"


def test_the_name_of_a_cgroup_tells_nothing_of_the_supervisor(walls: dict[str, Any]) -> None:
    applies(host().has("cgroup.pids"), "no cgroups for this user")
    applies(not alone(walls), "there, /proc is not shown")
    result = stockade.run(
        ["cat", "/proc/self/cgroup"], Policy(limits={"tasks": 64, "cpu": 1}, **walls), timeout=60
    )
    names = [line.split(":")[2] for line in result.check().text.splitlines()]
    assert any("stockade-run-" in name for name in names)
    words = {word for name in names for word in name.replace("/", "-").split("-")}
    assert words.isdisjoint({str(os.getpid()), f"{os.getpid():x}", str(os.getppid())})


class TestAStartThatMeetsTheLimitOfFilters:
    """Pretended by a gate and by a bubblewrap of ours: with the limit really met, no sandbox would start."""

    @pytest.fixture
    def full(self, sabotaged_gate: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        client.shutdown()
        monkeypatch.setattr("stockade.gate.executable", lambda: str(sabotaged_gate))
        monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (f"seccomp:{UNTRANSLATED}",))
        yield
        client.shutdown()

    @staticmethod
    def check(error: SetupError) -> None:
        assert "net.core.bpf_jit_limit" in error.message and "used up" in error.message
        assert "Unknown error" not in error.message and error.stage == "seccomp"
        assert "sysctl -w net.core.bpf_jit_limit=" in error.hint and "Seccomp_filters" in error.hint

    @pytest.mark.parametrize("backend", ["native", "landlock"])
    def test_names_it(self, backend: str, full: None) -> None:
        found = usable().get(backend)
        need(found is not None, f"the {backend} backend does not work here")
        assert found is not None
        with pytest.raises(SetupError) as caught:
            stockade.run(["true"], Policy(backend=backend, accept=list(found.accept)))
        self.check(caught.value)

    def test_names_it_behind_bubblewrap(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        need(usable().get("bwrap") is not None, "the bwrap backend does not work here")
        real = (
            bubblewraps.program(bubblewraps.OLD)
            if shutil.which("bwrap")
            else bubblewraps.program(bubblewraps.NEW)
        )
        full, broken = tmp_path / "full", tmp_path / "bwrap"
        broken.write_text(
            f"#!/bin/sh\nif [ -e {full} ]; then\n"
            'echo "bwrap: prctl(PR_SET_SECCOMP): Unknown error 524" >&2; exit 1; fi\n'
            f'exec {real} "$@"\n'
        )
        broken.chmod(0o755)
        bubblewraps.use(broken, monkeypatch)
        policy = Policy(backend="bwrap", accept=list(usable()["bwrap"].accept))
        stockade.run(["true"], policy, timeout=60).check()
        full.touch()
        with pytest.raises(SetupError) as caught:
            stockade.run(["true"], policy, timeout=60)
        self.check(caught.value)


class TestProgramsThatLoadFilters:
    """Go on without."""

    def run(self, *words: str, **policy: Any) -> str:
        return stockade.run(list(words), Policy(**policy), timeout=100).check().text

    def test_man_shows_a_page(self, workspace: Path, walls: dict[str, Any]) -> None:
        need_program("man")
        (workspace / "page.1").write_text(".TH PAGE 1\n.SH NAME\npage \\- says hello\n")
        (workspace / "config").write_text("MANDATORY_MANPATH /usr/share/man\n")
        shown = self.run(
            "man", "-C", f"{workspace}/config", "-l", f"{workspace}/page.1", read=[str(workspace)], **walls
        )
        assert "page - says hello" in shown

    def test_file_knows_a_program(self, walls: dict[str, Any]) -> None:
        need_program("file")
        assert "ELF" in self.run("file", "-L", "/usr/bin/env", **walls)

    def test_a_key_is_made(self) -> None:
        need_program("ssh-keygen")
        said = self.run("sh", "-c", "ssh-keygen -q -t ed25519 -N '' -f /tmp/key && cat /tmp/key.pub")
        assert said.startswith("ssh-ed25519 ")

    def test_tools_of_systemd_answer(self) -> None:
        need_program("systemd-escape")
        assert self.run("sh", "-c", "systemd-escape a/b; systemd-analyze calendar daily").startswith("a-b\n")

    @pytest.mark.parametrize("allow", [(), ("seccomp",)])
    def test_a_browser_shows_a_page(self, allow: tuple[str, ...]) -> None:
        browser = need_program("chromium-headless-shell")
        page = "data:text/html,<p>hello</p>"
        said = self.run(browser, "--no-sandbox", "--dump-dom", page, syscalls={"allow": allow})
        assert "<p>hello</p>" in said

    def test_libseccomp_says_that_there_are_none(self) -> None:
        """By which programs that use it decide."""
        code = (
            "import ctypes; l = ctypes.CDLL('libseccomp.so.2', use_errno=True)\n"
            "l.seccomp_init.restype = ctypes.c_void_p; l.seccomp_load.argtypes = [ctypes.c_void_p]\n"
            "print(l.seccomp_api_get(), l.seccomp_load(l.seccomp_init(0x7FFF0000)) < 0)"
        )
        command = [arena.PYTHON, "-c", code]
        control = subprocess.run(command, capture_output=True, text=True, check=False)
        need(not control.returncode, "libseccomp is not installed")
        assert self.run(*command) == "1 True\n" and control.stdout.endswith("False\n")


class TestProgramsThatAskForHugePages:
    """Take small ones."""

    def test_java(self) -> None:
        need_program("java")
        result = stockade.run(["java", "-XX:+UseLargePages", "-version"], timeout=100)
        assert result.check() and b"Runtime" in result.stderr

    def test_postgres(self) -> None:
        postgres = shutil.which("postgres") or next(
            map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres")), None
        )
        need(postgres is not None, "postgres is not installed")
        applies(not arena.IS_ROOT, "postgres does not run as root")
        bin = os.path.dirname(os.path.realpath(str(postgres)))
        script = (
            f"{bin}/initdb -D /tmp/db -U me >/tmp/log && "
            "echo 'huge_pages = try' >> /tmp/db/postgresql.conf && "
            f"echo 'select 6 * 7' | {bin}/postgres --single -D /tmp/db postgres"
        )
        result = stockade.run(["sh", "-c", script], timeout=100)
        assert '"42"' in result.check().text


class TestWithEveryWatchOfEpollUsedUp:
    """As 24 processes of 1,000 descriptors can do to their user, with 1 GB of memory. Pretended here."""

    @pytest.fixture(autouse=True)
    def used_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            def __init__(self) -> None:
                self._real = select.epoll()

            def register(self, descriptor: int, what: int) -> None:
                os.fstat(descriptor)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

        pretended = types.SimpleNamespace(**vars(select) | {"epoll": Full})
        monkeypatch.setattr("stockade.runs.io.eventloop.select", pretended)

    def test_a_program_runs_to_its_end(self, walls: dict[str, Any]) -> None:
        result = stockade.run(
            ["sh", "-c", "read line; echo $line; echo heard >&2; sleep 0.2; exit 3"],
            Policy(**walls),
            input=b"hello\n",
            timeout=60,
        )
        assert (result.stdout, result.stderr, result.exit_code) == (b"hello\n", b"heard\n", 3)

    def test_time_is_kept(self) -> None:
        result = stockade.run(["sleep", "60"], timeout=0.3)
        assert result.outcome == "timed-out" and result.usage.wall < 30

    def test_a_spawner_serves(self) -> None:
        with stockade.Spawner(Policy()) as spawner:
            found = [spawner.spawn(["sh", "-c", f"echo {n}"], timeout=60) for n in range(3)]
            assert [spawner.collect(number, 60).text for number in found] == ["0\n", "1\n", "2\n"]
            with pytest.raises(TimeoutError):
                spawner.collect(sleeping := spawner.spawn(["sleep", "60"]), 0.3)
            spawner.terminate(sleeping)
            assert spawner.collect(sleeping, 60).outcome == "cancelled"

    def test_an_event_loop_that_has_its_own_runs_sandboxes(self, walls: dict[str, Any]) -> None:
        class Selector(selectors.EpollSelector):
            """That of a loop which was made before the watches were used up."""

            def register(self, file: Any, events: int, data: Any = None) -> selectors.SelectorKey:
                if len(self.get_map()) >= 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().register(file, events, data)

        async def main() -> None:
            policy = Policy(**walls)
            assert (await stockade.run_async(["echo", "once"], policy)).text == "once\n"
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stockade.run_async(["sleep", "60"], policy)
            async with AsyncSandbox(policy) as box:
                assert (await box.run(["sh", "-c", "sleep 0.1; echo two"])).text == "two\n"
                with pytest.raises(SetupError, match="all epoll watches") as caught:
                    await box.start(["sleep", "60"])
                assert "fs.epoll.max_user_watches" in caught.value.hint
                assert (await box.run(["true"])).ok
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == before, "nothing is left"

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Selector())) as runner:
            runner.run(main())

    def test_a_shell_answers(self) -> None:
        with stockade.Sandbox(Policy()) as box, box.shell() as shell:
            assert shell.run("echo one").text == "one\n" and shell.run("echo two").text == "two\n"
