"""`stockade run`: streams, exit codes, JSON, workspaces and what it says about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STOCKADE = str(Path(sys.executable).with_name("stockade"))
Done = subprocess.CompletedProcess[bytes]
Call = Callable[..., Done]


@pytest.fixture
def call(workspace: Path) -> Call:
    """`stockade run` with these arguments in the workspace."""

    def start(*arguments: str, cwd: Path = workspace, **options: object) -> Done:
        settings = {"stdin": subprocess.DEVNULL} if "input" not in options else {}
        return subprocess.run(
            [STOCKADE, "run", *arguments],
            cwd=cwd,
            capture_output=True,
            check=False,
            timeout=60,
            **(settings | options),  # type: ignore[call-overload]
        )

    return start


def layers(state: Path) -> list[Path]:
    return sorted((state / "workspaces").iterdir()) if (state / "workspaces").exists() else []


class TestStreams:
    def test_they_are_passed_through_byte_exact(self, call: Call) -> None:
        given = bytes(range(256)) * 1000
        done = call("--", "sh", "-c", "tee /dev/stderr", input=given)
        assert (done.returncode, done.stdout, done.stderr) == (0, given, given)

    def test_the_first_line_arrives_before_the_program_ends(self, workspace: Path) -> None:
        command = [STOCKADE, "run", "--", "sh", "-c", "echo first; sleep 20"]
        with subprocess.Popen(
            command, cwd=workspace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            began = time.monotonic()
            assert process.stdout.readline() == b"first\n"
            assert time.monotonic() - began < 10 and process.poll() is None
            process.terminate()

    def test_more_than_the_output_limit_is_passed_through_all_the_same(self, call: Call) -> None:
        done = call("--limit", "output=1000", "--", "head", "-c", "100000", "/dev/zero")
        assert (done.returncode, len(done.stdout)) == (0, 100000)

    def test_a_reader_that_has_seen_enough_ends_it_quietly(self, workspace: Path) -> None:
        script = f"{STOCKADE} run -- yes | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=workspace,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "y\n141\n" and done.stderr == ""

    def test_it_works_without_any_stream(self, workspace: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        inner = f"touch {tmp_path}/out/ran"
        script = f"{STOCKADE} run --write {tmp_path}/out -- sh -c '{inner}' 0<&- 1>&- 2>&-"
        subprocess.run(["sh", "-c", script], cwd=workspace, timeout=60, check=False)
        assert (tmp_path / "out" / "ran").exists()


class TestExitCodes:
    @pytest.mark.parametrize(
        ("script", "code"),
        [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)],
    )
    def test_of_a_command_that_ran(self, call: Call, script: str, code: int) -> None:
        assert call("--", "sh", "-c", script).returncode == code

    @pytest.mark.parametrize(
        ("arguments", "code", "word"),
        [
            (["--timeout", "300ms", "--", "sleep", "60"], 124, b"timed-out"),
            (["--limit", "wall=300ms", "--", "sleep", "60"], 124, b"timed-out"),
            (["--read", "/no/such/path", "--", "true"], 125, b"/no/such/path"),
            (["--", "/etc"], 126, b"denied"),
            (["--", "no-such-command"], 127, b"no-such-command"),
            (["--"], 125, b"no command"),
            (["--timeout", "soon", "--", "true"], 125, b"is not a time"),
            (["--limit", "walls=3", "--", "true"], 125, b"limits.wall"),
            (["--env", "NOVALUE", "--", "true"], 125, b"K=V"),
            (["--backend", "native", "--net", "https://some", "--", "true"], 125, b"--net"),
        ],
    )
    def test_of_one_that_did_not(self, call: Call, arguments: list[str], code: int, word: bytes) -> None:
        done = call(*arguments)
        assert done.returncode == code, done.stderr
        assert word in done.stderr and b"Traceback" not in done.stderr
        assert all(line.startswith(b"stockade: ") for line in done.stderr.splitlines())

    def test_of_an_unknown_option(self, call: Call) -> None:
        done = call("--no-such-option", "--", "true")
        assert done.returncode == 2 and b"--no-such-option" in done.stderr


class TestJson:
    def test_it_is_the_only_thing_printed(self, call: Call) -> None:
        done = call("--json", "--", "sh", "-c", "echo out; echo err >&2; touch x; exit 3")
        result = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (3, b"")
        assert (result["outcome"], result["exit_code"], result["ok"]) == ("exited", 3, False)
        assert (result["stdout"], result["stderr"]) == ("out\n", "err\n")
        assert result["changes"] == [{"path": "x", "kind": "added"}]
        assert result["controls"]["files"]["mechanism"] and result["usage"]["wall"] > 0

    def test_what_is_not_text_is_base64(self, call: Call) -> None:
        import base64

        result = json.loads(call("--json", "--", "printf", r"\377\000").stdout)
        assert base64.b64decode(result["stdout_base64"]) == b"\xff\0" and "stdout" not in result

    def test_a_refusal_is_told_in_json_too(self, call: Call) -> None:
        done = call("--json", "--read", "/no/such/path", "--", "true")
        result = json.loads(done.stdout)
        assert (done.returncode, result["outcome"], result["exit_code"]) == (125, "setup-failed", 125)
        assert "/no/such/path" in result["reason"] and result["hint"]

    @pytest.mark.parametrize(
        ("arguments", "outcome", "code"),
        [
            (["--timeout", "0.3", "--", "sleep", "60"], "timed-out", 124),
            (["--", "no-such-command"], "setup-failed", 127),
            (["--", "sh", "-c", "kill -9 $$"], "signalled", 137),
        ],
    )
    def test_it_tells_the_outcomes_apart(
        self, call: Call, arguments: list[str], outcome: str, code: int
    ) -> None:
        done = call("--json", *arguments)
        assert (json.loads(done.stdout)["outcome"], done.returncode) == (outcome, code)

    def test_a_file_name_that_is_not_utf8_does_not_break_it(self, call: Call) -> None:
        done = call("--json", "--", "sh", "-c", r'touch "$(printf "a\377b")"')
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["changes"][0]["kind"] == "added"

    def test_on_a_descriptor_of_its_own_the_streams_pass_through(self, call: Call) -> None:
        reader, writer = os.pipe()
        try:
            done = call("--json-fd", str(writer), "--", "echo", "hello", pass_fds=(writer,))
            os.close(writer)
            with os.fdopen(os.dup(reader), "rb") as file:
                result = json.loads(file.read())
        finally:
            os.close(reader)
        assert done.stdout == b"hello\n"
        assert (result["outcome"], result["stdout"]) == ("exited", "")

    def test_a_descriptor_that_is_not_open_is_refused_before_anything_runs(
        self, call: Call, tmp_path: Path
    ) -> None:
        (tmp_path / "out").mkdir()
        done = call("--json-fd", "77", "--write", str(tmp_path / "out"), "--", "touch", f"{tmp_path}/out/ran")
        assert done.returncode == 125 and b"Traceback" not in done.stderr and b"77" in done.stderr
        assert not (tmp_path / "out" / "ran").exists()


class TestWorkspace:
    def test_the_current_directory_is_an_overlay(
        self, call: Call, workspace: Path, stockade_home: Path
    ) -> None:
        done = call("--", "sh", "-c", "pwd; echo x > new")
        assert done.stdout == f"{workspace}\n".encode()
        assert not (workspace / "new").exists()
        (layer,) = layers(stockade_home)
        said = done.stderr.decode()
        assert "1 changed path kept aside" in said and "added" in said and "new" in said
        assert f"stockade diff {layer.name}" in said

    def test_an_unchanged_one_is_not_worth_a_word(self, call: Call, stockade_home: Path) -> None:
        assert call("--", "ls").stderr == b""
        assert layers(stockade_home) == []

    def test_changes_can_be_discarded(self, call: Call, stockade_home: Path) -> None:
        done = call("--discard", "--", "touch", "x")
        assert b"1 changed path discarded" in done.stderr
        assert layers(stockade_home) == []

    def test_a_long_list_is_cut(self, call: Call) -> None:
        done = call("--", "sh", "-c", "seq 1 30 | xargs touch")
        assert done.stderr.count(b"added") == 20 and b"and 10 more" in done.stderr

    @pytest.mark.parametrize(("mode", "lands"), [("rw", True), ("ro", False)])
    def test_other_modes(self, call: Call, workspace: Path, mode: str, lands: bool) -> None:
        policy = workspace.parent / "policy.toml"
        policy.write_text(f'protect = []\nworkspace = {{ path = "{workspace}" }}\n')
        call("-p", str(policy), "--mode", mode, "--", "touch", "x")
        assert (workspace / "x").exists() is lands

    def test_another_directory(self, call: Call, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        assert call("-w", str(tmp_path / "other"), "--", "pwd").stdout == f"{tmp_path}/other\n".encode()

    @pytest.mark.parametrize("where", ["~", "/", "/usr", "state"])
    def test_where_there_can_be_none_it_says_so(self, call: Call, where: str, stockade_home: Path) -> None:
        stockade_home.mkdir(mode=0o700, exist_ok=True)
        cwd = stockade_home.parent if where == "state" else Path(where).expanduser()
        done = call("--", "pwd", cwd=cwd)
        assert done.stdout.decode().strip() == os.path.expanduser("~")
        assert b"no workspace" in done.stderr
        assert call("-q", "--", "pwd", cwd=cwd).stderr == b""

    def test_control_characters_of_file_names_do_not_reach_the_terminal(self, call: Call) -> None:
        script = r"""touch "$(printf 'evil\033]0;owned\007\033[2J\r')" "$(printf 'c1\302\233x')" """
        done = call("--", "sh", "-c", script)
        assert not any(code in done.stderr for code in (b"\x1b", b"\x07", b"\r", b"\xc2\x9b"))
        assert rb"evil\x1b]0;owned" in done.stderr

    def test_a_newline_in_a_file_name_does_not_forge_a_line(self, call: Call) -> None:
        done = call("--", "sh", "-c", r"""touch "$(printf 'a\nerror: all is lost')" """)
        assert b"1 changed path" in done.stderr
        assert b"stockade: error: all is lost" not in done.stderr.splitlines()


class TestWhatItSays:
    def test_quiet_says_nothing_but_errors(self, call: Call) -> None:
        assert call("-q", "--", "touch", "x").stderr == b""
        assert b"/none" in call("-q", "--read", "/none", "--", "true").stderr

    def test_a_quiet_failure_to_start_is_still_told(self, call: Call) -> None:
        assert b"no-such-command" in call("-q", "--", "no-such-command").stderr

    def test_verbose_says_what_was_enforced(self, call: Call) -> None:
        said = call("-v", "--", "true").stderr.decode()
        for control in ("files", "network.none", "syscalls", "privileges", "workspace.overlay"):
            assert f"stockade: {control}: " in said

    def test_there_is_no_colour_in_a_pipe(self, call: Call) -> None:
        assert b"\x1b" not in call("--", "no-such-command").stderr

    def test_the_commands_own_failure_is_its_own_business(self, call: Call) -> None:
        assert call("--", "false").stderr == b""


class TestOptions:
    def test_grants_variables_and_network(
        self, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PASSED", "from the host")
        for name in ("in", "out"):
            (tmp_path / name).mkdir()
        script = f"ls {tmp_path}; echo $SET $PASSED; touch {tmp_path}/out/x {tmp_path}/in/x"
        arguments = ["--read", f"{tmp_path}/in", "--write", f"{tmp_path}/out", "--env", "SET=a=b"]
        done = call(*arguments, "--pass-env", "PASSED", "--", "sh", "-c", script)
        assert done.stdout == b"in\nout\nworkspace\na=b from the host\n"
        assert done.returncode == 1
        assert os.listdir(tmp_path / "out") == ["x"] and os.listdir(tmp_path / "in") == []

    def test_what_is_denied_is_hidden(self, call: Call, workspace: Path) -> None:
        for name in (".env", "key", "kept"):
            (workspace / name).write_text(name)
        done = call("--deny", ".env", "--deny", f"{workspace}/key", "--", "ls", "-A")
        assert (done.returncode, done.stdout) == (0, b"kept\n")

    def test_the_private_memory_is_limited(self, call: Call) -> None:
        script = "head -c 2000000 /dev/zero > /tmp/x"
        assert call("--mode", "ro", "--limit", "disk=1M", "--", "sh", "-c", script).returncode == 1
        assert call("--mode", "ro", "--limit", "disk=2M", "--", "sh", "-c", script).returncode == 0
        assert call("--limit", "disk=1M", "--", "sh", "-c", script.replace("/tmp/", "")).returncode == 1

    def test_the_double_dash_may_be_left_out(self, call: Call) -> None:
        assert call("echo", "-n", "x").stdout == b"x"

    def test_options_of_the_command_are_the_commands(self, call: Call) -> None:
        assert call("--", "echo", "--json", "-q", "--").stdout == b"--json -q --\n"

    def test_a_policy_file_is_the_only_one_looked_at(self, call: Call, workspace: Path) -> None:
        (workspace / "stockade.toml").write_text("this is not TOML")
        policy = workspace.parent / "policy.toml"
        policy.write_text('env = { FROM = "the file" }\n')
        done = call("-p", str(policy), "--", "sh", "-c", "echo $FROM")
        assert done.stdout == b"the file\n"


class TestProject:
    """A stockade.toml that came with the project."""

    def test_it_may_narrow(self, call: Call, workspace: Path) -> None:
        (workspace / "stockade.toml").write_text('[limits]\nfiles = 99\n[workspace]\nmode = "ro"\n')
        done = call("--", "sh", "-c", "ulimit -n; touch x")
        assert done.stdout == b"99\n" and b"Read-only" in done.stderr

    @pytest.mark.parametrize(
        "widening",
        ['read = ["/opt"]', 'write = ["."]', 'net = "open"', 'pass_env = ["AWS_KEY"]', "protect = []"],
    )
    def test_it_cannot_widen(self, call: Call, workspace: Path, widening: str) -> None:
        (workspace / "stockade.toml").write_text(widening + "\n")
        done = call("--", "echo", "ran")
        assert (done.returncode, done.stdout) == (125, b"")
        assert b"stockade trust" in done.stderr and widening.partition(" ")[0].encode() in done.stderr

    def test_it_can_once_it_is_trusted_and_until_it_changes(
        self, call: Call, workspace: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "data").mkdir()
        file = workspace / "stockade.toml"
        file.write_text(f'read = ["{tmp_path}/data"]\n')
        assert call("--", "ls", f"{tmp_path}/data").returncode == 125
        agreed = subprocess.run(
            [STOCKADE, "trust", str(file)], cwd=workspace, capture_output=True, timeout=60, check=False
        )
        assert agreed.returncode == 0
        assert call("--", "ls", f"{tmp_path}/data").returncode == 0
        file.write_text(file.read_text() + "# changed\n")
        assert call("--", "ls", f"{tmp_path}/data").returncode == 125

    def test_it_is_read_only_inside(self, call: Call, workspace: Path) -> None:
        for name in (".git/hooks", ".vscode", ".claude"):
            (workspace / name).mkdir(parents=True)
        for name in (".git/config", ".envrc"):
            (workspace / name).touch()
        file = workspace / "stockade.toml"
        file.write_text("[limits]\nfiles = 99\n")
        done = call("--mode", "rw", "--", "sh", "-c", "touch other; echo 'net = \"open\"' > stockade.toml")
        assert b"Read-only file system" in done.stderr
        assert (workspace / "other").exists()
        assert file.read_text() == "[limits]\nfiles = 99\n"
