"""`exec`: execve takes the listed files and no other, whatever the program makes itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import PYTHON, inside, outside
from stockade import Policy, PolicyError
from stockade.sandbox.sandbox import RunExtras, run_once
from support.means import need_program

LISTED = [os.path.realpath(PYTHON)]
REFUSED = {"EACCES", "EPERM"}


def policy(workspace: Path, mode: str, **more: Any) -> dict[str, Any]:
    return {"workspace": {"path": str(workspace), "mode": mode}, "protect": [], "exec": LISTED, **more}


@pytest.mark.parametrize("mode", ["overlay", "rw"])
def test_nothing_that_the_program_makes_can_be_executed(workspace: Path, granted: Path, mode: str) -> None:
    places = [workspace, granted, "/tmp", "/dev/shm"]
    rules = policy(workspace, mode, write=[str(granted)])
    verdict = inside("executing", *places, **rules)
    # Between the shared object and its loader there is an exit code, not an error.
    for name in [name for name in verdict if name.startswith("loaded")]:
        assert verdict.pop(name) == "ended with 127"
    assert verdict.pop("secret memory file") in {*REFUSED, "ENOSYS", "ENOEXEC"}
    assert set(verdict.values()) <= REFUSED, verdict
    control = outside("executing", *places[:2])
    for name in [name for name in control if name.startswith(("sealed", "secret"))]:
        assert control.pop(name) != "ran"  # there is no way to execute these, with or without walls
    assert set(control.values()) == {"ran"}, control


def test_nothing_can_be_executed_from_the_private_home() -> None:
    result = stockade.run(["sh", "-c", "cp /bin/true $HOME/t; $HOME/t; echo $?"], Policy(exec=["/usr/bin/*"]))
    assert result.text == "126\n"


def test_a_program_that_is_not_listed_is_refused(workspace: Path) -> None:
    other = os.path.realpath("/bin/true")
    assert inside("executing", other, **policy(workspace, "overlay"))[other] == "EACCES"
    assert outside("executing", other)[other] == "ran"
    rules = policy(workspace, "overlay") | {"exec": [*LISTED, "/bin/true"]}
    assert inside("executing", other, **rules)[other] == "ran"


def test_a_command_that_is_not_listed_is_denied(workspace: Path) -> None:
    result = stockade.run(["/bin/ls"], Policy(**policy(workspace, "overlay")))
    assert (result.outcome, result.exit_code) == ("denied", 126)
    assert result.controls["exec"].observed.startswith("noexec mounts read from the kernel")


def test_memory_files_that_can_be_executed_cannot_be_allowed() -> None:
    with pytest.raises(PolicyError, match="within bounds that no policy can lift"):
        stockade.run(["true"], Policy(exec=["/usr/bin/*"], syscalls={"allow": ["memfd_create"]}))


def test_a_binary_in_a_readable_grant_runs_only_if_it_is_listed(workspace: Path, granted: Path) -> None:
    tool = granted / "tool"
    shutil.copy("/bin/true", tool)
    rules = policy(workspace, "overlay", read=[str(granted)])
    assert inside("executing", tool, **rules)[str(tool)] == "EACCES"
    assert inside("executing", tool, **{**rules, "exec": [*LISTED, str(granted / "t*")]})[str(tool)] == "ran"
    assert outside("executing", tool)[str(tool)] == "ran"


def test_a_file_handed_in_as_stdin_cannot_be_executed(workspace: Path) -> None:
    code = "import os; os.execve(0, ['true'], {})"
    with open("/bin/true", "rb") as file:
        result = run_once(
            [LISTED[0], "-c", code], Policy(**policy(workspace, "ro")), {}, RunExtras(stdin=file.fileno())
        )
    assert result.exit_code != 0 and b"PermissionError" in result.stderr


@pytest.mark.parametrize("grant", ["workspace", "write"])
def test_what_the_program_can_write_cannot_be_listed(workspace: Path, granted: Path, grant: str) -> None:
    shutil.copy("/bin/true", granted / "tool")
    where = {"workspace": {"workspace": str(granted)}, "write": {"write": [str(granted)]}}[grant]
    for pattern in (f"{granted}/tool", f"{granted}/*", f"{granted.parent}/**"):
        with pytest.raises(PolicyError, match="where the program can write"):
            stockade.run(["true"], Policy(exec=["/usr/bin/*", pattern], **where))


def test_a_denied_program_cannot_be_listed() -> None:
    true = os.path.realpath("/bin/true")
    assert stockade.run(["true"], Policy(exec=["/usr/bin/*"], deny=[true])).exit_code == 127
    with pytest.raises(PolicyError, match="the policy shows none of it inside"):
        stockade.run(["true"], Policy(exec=[true], deny=[true]))
    assert stockade.run(["true"], Policy(exec=["/usr/bin/*", f"{true}?"], deny=[true])).exit_code == 127
    for pattern in ("/none?", f"{true}?"):
        with pytest.raises(PolicyError, match="nothing could run"):
            stockade.run(["true"], Policy(exec=[pattern], deny=[true]))


def test_a_directory_of_programs_serves_a_shell(workspace: Path) -> None:
    script = "ls / >/dev/null && echo a | sed s/a/b/ && awk 'BEGIN { print 1 }' && /usr/sbin/nologin; echo $?"
    result = stockade.run(["sh", "-c", script], Policy(**policy(workspace, "rw") | {"exec": ["/usr/bin/*"]}))
    assert result.text == "b\n1\n126\n"


def test_ordinary_python_works_without_executable_memory_files(workspace: Path) -> None:
    code = """
import ctypes, mmap, multiprocessing, tempfile, subprocess, sqlite3, ssl
callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: n + 1)
assert callback(1) == 2
mmap.mmap(-1, 4096)
with tempfile.TemporaryFile(buffering=0) as file:
    file.write(b"x" * 4096)
    mmap.mmap(file.fileno(), 0)
with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
print("fine")
"""
    result = stockade.run([LISTED[0], "-c", code], Policy(**policy(workspace, "overlay")))
    assert result.text == "fine\n", result.stderr.decode()


def test_node_works_without_executable_memory_files(workspace: Path) -> None:
    node = need_program("node")
    real = os.path.realpath(node)
    rules = policy(workspace, "overlay", read=[os.path.dirname(real)]) | {"exec": [real]}
    code = "let s = 0; for (let i = 0; i < 3e6; i++) s += i % 7; console.log(s)"
    assert stockade.run([real, "-e", code], Policy(**rules)).text == "8999994\n"


def test_not_promised_an_interpreter_runs_what_it_reads(workspace: Path) -> None:
    """A listed shell or Python executes any text; `exec` is about files that the kernel starts."""
    (workspace / "script.sh").write_text("echo from a script\n")
    rules = policy(workspace, "overlay") | {"exec": ["/bin/sh"]}
    assert stockade.run(["sh", "script.sh"], Policy(**rules)).text == "from a script\n"
    assert stockade.run(["sh", "-c", "./script.sh"], Policy(**rules)).exit_code == 126


def test_not_promised_the_loader_starts_a_readable_program_that_is_not_listed(workspace: Path) -> None:
    loader = next(Path("/lib64").glob("ld-linux*"), None) or next(Path("/lib").glob("ld-linux*"))
    rules = policy(workspace, "overlay") | {"exec": ["/bin/sh"]}
    listed = stockade.run(["sh", "-c", f"{loader} /bin/echo reached; /bin/echo directly"], Policy(**rules))
    assert listed.text == "reached\n" and listed.exit_code == 126
