"""/proc: of the sandbox's own processes, read-only, and never a way to the gate or to the host."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy, gate
from support.means import applies, need

REFUSED = {"EROFS", "EACCES", "EPERM"}
#: Each would act on the whole machine.
DANGEROUS = [
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/fs/suid_dumpable",
]
OWN = [
    "/proc/self/oom_score_adj",
    "/proc/self/coredump_filter",
    "/proc/self/comm",
    "/proc/self/timerslack_ns",
]
#: What the kernel tells of itself.
KERNEL = ["/proc/kcore", "/proc/kmsg"]
GATE = ["environ", "mem", "maps", "exe", "fd", "fdinfo", "auxv", "syscall", "stack", "map_files", "ns"]


@pytest.fixture(scope="module")
def gate_unchanged() -> object:
    def digest() -> str:
        return hashlib.sha256(Path(gate.executable()).read_bytes()).hexdigest()

    before = digest()
    yield
    assert digest() == before


@pytest.mark.parametrize("path", DANGEROUS)
def test_a_switch_of_the_machine_cannot_be_opened_for_writing(path: str) -> None:
    """To root without capabilities they would be writable: the files belong to uid 0."""
    answer = inside("proc", "write", path)[path]
    applies(os.path.exists(path), f"this kernel has no {path}")
    assert answer == "EROFS" if arena.IS_ROOT else answer in REFUSED
    applies(arena.IS_ROOT, "refused inside; outside only root can open it")
    assert outside("proc", "write", path) == {path: "ok"}


def test_no_sysctl_at_all_can_be_opened_for_writing() -> None:
    verdict = inside("proc", "write", "sysctls")
    assert len(verdict) > 100
    assert set(verdict.values()) <= REFUSED, {path: a for path, a in verdict.items() if a == "ok"}
    # A user namespace owns a few of them; there they can be opened.
    assert "ok" in outside("proc", "write", "sysctls", namespaces="user net pid").values()


@pytest.mark.parametrize("path", OWN)
def test_even_its_own_process_cannot_be_adjusted_through_proc(path: str) -> None:
    assert inside("proc", "write", path) == {path: "EROFS"}
    assert outside("proc", "write", path) == {path: "ok"}


@pytest.mark.parametrize("path", KERNEL)
def test_the_kernels_memory_and_log_cannot_be_read(path: str) -> None:
    assert inside("proc", "read", path)[path] in REFUSED | {"ENOENT"}
    applies(arena.IS_ROOT, "refused inside; outside only root can open it")
    applies(os.path.exists(path), f"refused inside; this kernel has no {path}")
    assert outside("proc", "read", path) == {path: "ok"}


@pytest.mark.parametrize("part", GATE)
def test_the_first_process_cannot_be_looked_into(part: str) -> None:
    path, own = f"/proc/1/{part}", f"/proc/self/{part}"
    assert inside("peek", path)[path] in REFUSED
    control = outside("peek", own)[own]
    assert control not in REFUSED or (part == "stack" and not arena.IS_ROOT)


def test_the_hosts_files_are_not_behind_any_processs_root_or_cwd(hidden: Path) -> None:
    verdict = inside("roots", hidden / "secret")
    assert verdict["/proc/self/root"] == ["ok", "ENOENT"]
    assert verdict["/proc/self/cwd"] == ["ok", "ENOENT"]
    assert verdict["/proc/1/root"] == verdict["/proc/1/cwd"] == ["EACCES", "EACCES"]
    assert not [path for path, (_, reached) in verdict.items() if reached == "ok"]
    assert outside("roots", hidden / "secret")["/proc/self/root"] == ["ok", "ok"]


@pytest.mark.usefixtures("gate_unchanged")
@pytest.mark.parametrize("process", ["self", "1"])
def test_an_executable_cannot_be_overwritten_through_proc(process: str, tmp_path: Path) -> None:
    """CVE-2019-5736: the launcher was rewritten from within."""
    path = f"/proc/{process}/exe"
    assert inside("proc", "write", path)[path] in REFUSED | {"ETXTBSY"}
    own = tmp_path / "program"
    own.write_bytes(b"not running")
    assert outside("proc", "write", own) == {str(own): "ok"}


@pytest.mark.usefixtures("gate_unchanged")
@pytest.mark.parametrize("how", ["directly", "link", "script"])
def test_the_launcher_cannot_be_made_to_start_itself(workspace: Path, how: str) -> None:
    """CVE-2019-5736 again: started as /proc/self/exe, the launcher would run as the program."""
    path = workspace / "program"
    if how == "link":
        path.symlink_to("/proc/self/exe")
    elif how == "script":
        path.write_text("#!/proc/self/exe\n")
        path.chmod(0o755)
    command = "/proc/self/exe" if how == "directly" else str(path)
    result = stockade.run([command], Policy(workspace=str(workspace)), timeout=10)
    assert (result.outcome, result.exit_code) == ("denied", 126), result
    assert b"stockade-gate" not in result.stderr
    # Outside the launcher is this interpreter, and does start as the program.
    again = [command, "-c", "print('again')"] if how != "script" else [command]
    done = subprocess.run(again, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout == (b"" if how == "script" else b"again\n")


def test_the_supervisors_secrets_are_in_no_environment_inside(
    monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    monkeypatch.setenv("STOCKADE_TEST_TOKEN", "hunter2-hunter2")
    turned = "hunter2-hunter2"[::-1]
    assert inside("secrets", turned) == []
    assert inside("secrets", turned, workspace=str(workspace), profile="dev") == []
    assert "own environment" in outside("secrets", turned)


def test_a_variable_goes_in_only_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCKADE_TEST_TOKEN", "hunter2-hunter2")
    monkeypatch.setenv("STOCKADE_TEST_OTHER", "hello")
    turned = "hunter2-hunter2"[::-1]
    assert inside("secrets", turned, pass_env=["STOCKADE_TEST_OTHER"], env={"MORE": "x"}) == []
    assert inside("secrets", turned, pass_env=["STOCKADE_TEST_TOKEN"])[0] == "own environment"


def test_the_place_of_stockades_state_is_not_told(workspace: Path, stockade_home: Path) -> None:
    assert inside("secrets", str(stockade_home)[::-1], workspace=str(workspace)) == []
    control = outside("secrets", str(stockade_home)[::-1])
    need("own environment" in control, "the environment does not name the state directory")


def test_only_the_sandboxs_own_processes_are_listed() -> None:
    numbers = [int(name) for name in inside("listing", "/proc") if name.isdigit()]
    assert len(numbers) == 2 and min(numbers) == 1
    assert str(os.getpid()) in outside("listing", "/proc")
