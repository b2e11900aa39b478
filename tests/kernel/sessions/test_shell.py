"""One bash, many runs: what stays, what does not, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import AsyncSandbox, Policy, PolicyError, Sandbox, SetupError, UnsupportedError
from stockade.linux import proctree
from stockade.policy import Control
from stockade.sessions import exchange
from stockade.sessions.exchange import Answers, DriverReply
from stockade.sessions.shell import Shell

#: Where the driver answers.
ANSWERS = 253
EVERY_BYTE = bytes(range(256)) * 40
WITHOUT_BASH = Policy(deny=["/usr/bin/bash", "/bin/bash"])


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box


@pytest.fixture
def shell(box: Sandbox) -> Iterator[Shell]:
    with box.shell() as shell:
        yield shell


class TestWhatStays:
    def test_directory_variables_functions_options_and_jobs(self, shell: Shell) -> None:
        shell.run(
            "cd /usr; X='a  b'; declare -A m=([k]=v); f() { echo \"f $1\"; }; set -o noglob; sleep 60 &"
        )
        result = shell.run('pwd; echo "$X" ${m[k]} *; f 1; jobs | grep -c sleep; kill %1')
        assert result.text == "/usr\na  b v *\nf 1\n1\n"

    def test_the_same_process_serves_every_run(self, shell: Shell) -> None:
        assert shell.run("echo $$").text == shell.run("echo $$").text == shell.run("exit 1; ").text + "3\n"

    @pytest.mark.parametrize(
        "end", ["exit 7", "set -e; (exit 7); echo no", "f 7; echo no", "trap 'exit 7' ERR; false"]
    )
    def test_it_outlives_exit_and_set_e(self, shell: Shell, end: str) -> None:
        shell.run(
            "cd /usr; X=$'two\\nlines'; readonly R=1; export E=2; a=(1 '2 3'); "
            "f() { exit $1; }; g() { echo g; }; "
            "shopt -s extglob; umask 077; exec 5</etc/hostname"
        )
        result = shell.run(end, env={"ONLY": "once"})
        assert (result.outcome, result.exit_code, result.reason) == ("exited", 7, "exited with 7")
        result = shell.run(
            'pwd; echo "$X" $R; printenv E; echo ${#a[@]} $(umask) [$ONLY]; g; '
            "shopt -q extglob && [[ -e /proc/self/fd/5 ]]"
        )
        assert (result.text, result.exit_code) == ("/usr\ntwo\nlines 1\n2\n2 0077 []\ng\n", 0)

    def test_exits_leave_no_descriptor_behind(self, shell: Shell) -> None:
        before = shell.run("a=(/proc/$$/fd/*); echo ${#a[@]}").text
        for _ in range(5):
            shell.run("exit 1")
        assert shell.run("a=(/proc/$$/fd/*); echo ${#a[@]}").text == before

    def test_redirections_by_exec_end_with_the_run(self, shell: Shell) -> None:
        shell.run("exec >/dev/null 2>&1 </dev/zero; echo lost")
        assert shell.run("echo here; cat").stdout == b"here\n"

    def test_the_environment_of_one_run_is_not_that_of_the_next(self, shell: Shell) -> None:
        shell.run("A=kept; export A")
        result = shell.run("cd /usr; B=2; printenv A C; A=changed", env={"A": "a 'b'\n\\é", "C": "c"})
        assert result.stdout.decode() == "a 'b'\n\\é\nc\n"
        assert shell.run("pwd; printenv A; echo $B [$C]").text == "/usr\nkept\n2 []\n"
        shell.run("f() { exit 1; }; f", env={"A": "x", "C": "y"})
        shell.run("sleep 60", env={"A": "x", "C": "y"}, timeout=0.05)
        assert shell.run("printenv A; echo [$C]").text == "kept\n[]\n"

    def test_a_readonly_variable_cannot_be_set_for_one_run(self, shell: Shell) -> None:
        shell.run("readonly R=1")
        result = shell.run("echo $R", env={"R": "2"})
        assert (result.exit_code, result.stdout) == (1, b"") and b"readonly" in result.stderr
        assert shell.run("echo $R").text == "1\n"

    @pytest.mark.parametrize("env", [{"A.B": "1"}, {"1": ""}, {"A": "\0"}, {"": ""}])
    def test_what_no_shell_can_set_is_refused(self, shell: Shell, env: dict[str, str]) -> None:
        with pytest.raises(PolicyError, match="env"):
            shell.run("true", env=env)


class TestStreams:
    def test_both_streams_are_exact_and_apart(self, shell: Shell) -> None:
        result = shell.run("cat; printf '\\n\\n \\n' >&2", input=EVERY_BYTE)
        assert (result.stdout, result.stderr) == (EVERY_BYTE, b"\n\n \n")
        assert shell.run("printf x").stdout == b"x"

    def test_code_is_any_text(self, shell: Shell) -> None:
        assert shell.run('echo \'ä\\n\t"$\'\n\n#é\necho "\udcff"').stdout == 'ä\\n\t"$\n'.encode() + b"\xff\n"
        code = f"x={'y' * 300_000}; echo ${{#x}}"
        assert shell.run(code).text == "300000\n"
        with pytest.raises(PolicyError, match="NUL"):
            shell.run("echo \0")

    def test_input_ends_and_its_rest_is_not_the_next_runs(self, shell: Shell) -> None:
        assert shell.run("read x; echo $x", input=b"one\ntwo\n" + b"x" * 30_000).text == "one\n"
        assert shell.run("cat; read x || echo none").text == "none\n"
        big = os.urandom(1 << 20)
        assert shell.run("head -c 5", input=big).stdout == big[:5]
        assert shell.run("cat", input=big).stdout == big
        assert shell.run("cat").stdout == b""

    def test_output_past_the_limit_is_spilled(self) -> None:
        with Sandbox(Policy(limits={"output": 1000})) as box, box.shell() as shell:
            result = shell.run("seq 1000")
            (spilled,) = result.spilled
            whole = b"".join(b"%d\n" % n for n in range(1, 1001))
            assert result.truncated and result.stdout + Path(spilled.path).read_bytes() == whole
            assert shell.run("echo on").text == "on\n"

    def test_callbacks_get_everything_as_it_comes(self, box: Sandbox, shell: Shell) -> None:
        out: list[bytes] = []
        seen = threading.Event()
        running = threading.Thread(
            target=shell.run,
            args=("echo a; cat /tmp/go; echo b",),
            kwargs={"on_stdout": lambda data: (out.append(data), seen.set())},
        )
        shell.run("mkfifo /tmp/go")
        running.start()
        assert seen.wait(30) and out == [b"a\n"]
        box.run(["sh", "-c", "echo go > /tmp/go"])
        running.join()
        assert b"".join(out) == b"a\ngo\nb\n"

    def test_a_program_that_makes_its_output_nonblocking_spoils_it_for_no_later_run(
        self, shell: Shell
    ) -> None:
        shell.run("python3 -c 'import os; os.set_blocking(1, False); os.set_blocking(0, False)'", input=b"x")
        result = shell.run("seq 200000")
        assert (len(result.stdout), result.stderr, result.exit_code) == (1288895, b"", 0)

    def test_traces_and_traps_see_nothing_of_the_driver(self, shell: Shell) -> None:
        shell.run("set -x")
        assert shell.run("echo a").stderr.strip(b"+ ") == b"echo a\n"
        shell.run("set +x; trap 'echo dbg' DEBUG")
        assert shell.run("echo a").text == "dbg\na\n"

    def test_errors_name_the_line_of_the_code(self, shell: Shell) -> None:
        result = shell.run("\n\nno-such-command")
        assert (result.exit_code, result.stderr) == (
            127,
            b"bash: line 3: no-such-command: command not found\n",
        )

    def test_background_jobs_do_not_hold_the_run_and_print_with_a_later_one(self, shell: Shell) -> None:
        assert shell.run("mkfifo /tmp/go; (cat /tmp/go; echo late) & echo now").text == "now\n"
        assert shell.run("echo go > /tmp/go; wait; echo then").text == "go\nlate\nthen\n"


ENDS_NOTHING = [
    ("echo 'unclosed", 2),
    ("cat <<END\nwithout end", 0),
    ("if true; then", 2),
    ("}", 2),
    ("$(", 2),
    ("cat", 0),
    ("read x", 1),
    ("break", 0),
    ("continue", 0),
    ("return 3", 2),
    ("set -u; echo $nothing", 127),
    (": ${nothing:?is missing}", 127),
    ("(exit 3)", 3),
    ("sh -c 'kill -9 $$'", 137),
    ("set -o nosuch", 2),
    ("read() { false; }; eval() { false; }; printf() { false; }; exit() { false; }; false", 1),
    ("TMOUT=1", 0),
    ("LC_ALL=C; LANG=; IFS=0123456789", 0),
    ("sleep 60 & disown; setsid sleep 60 & true", 0),
    ("yes | head -c 100000 | tail -c 0; wc -c < /dev/null > /dev/null; exec 3>&1 4>&2 5<&0; exec 3>&-", 0),
    ("ulimit -n 20; ls > /dev/null", 0),
    ("set -- a 'b c'; exit 4", 4),
]
ENDS_IT = [
    ("exec bash", "exited", 0),
    ("exec sh -c 'exit 4'", "exited", 4),
    ("for f in /proc/$$/fd/*; do eval \"exec ${f##*/}>&-\"; done; (exit 6)", "exited", 6),
    (f"exec {ANSWERS}>&-; (exit 5)", "exited", 5),
    (f"exec {ANSWERS}</dev/null; (exit 5)", "exited", 5),
    ("trap 'echo bye' EXIT; exit 3", "exited", 3),
    ("set -o posix; exit 9", "exited", 9),
    ("kill -9 $$", "signalled", 137),
    ("kill $$; sleep 60", "signalled", 143),
]  # fmt: skip


class TestItsEnd:
    @pytest.mark.parametrize(("code", "status"), ENDS_NOTHING)
    def test_what_does_not_end_it(self, shell: Shell, code: str, status: int) -> None:
        shell.run("X=kept")
        result = shell.run(code, timeout=20)
        assert (result.outcome, result.exit_code) == ("exited", status)
        assert shell.run("echo $X", timeout=20).text == "kept\n"

    @pytest.mark.parametrize(("code", "outcome", "status"), ENDS_IT)
    def test_what_ends_it_is_said_and_the_next_run_has_a_fresh_one(
        self, shell: Shell, code: str, outcome: str, status: int
    ) -> None:
        shell.run("X=kept; cd /usr")
        result = shell.run(code, timeout=20)
        assert (result.outcome, result.exit_code) == (outcome, status)
        assert result.reason.startswith("the shell ended") and "fresh" in result.hint
        assert shell.run("echo [$X]", timeout=20).text == "[]\n"

    def test_one_that_ends_between_two_runs_is_replaced_and_that_is_said(
        self, box: Sandbox, shell: Shell
    ) -> None:
        shell.run("mkfifo /tmp/go; (cat /tmp/go; kill -9 $$) & X=1")
        assert shell._line is not None and not shell._line.ended
        box.run(["sh", "-c", "echo > /tmp/go"])
        while not shell._line.ended:
            pass
        result = shell.run("echo [$X]")
        assert (result.text, result.ok) == ("[]\n", True) and "fresh" in result.hint

    def test_what_it_hands_to_programs_are_pipes(self, shell: Shell) -> None:
        found = shell.run("for f in /proc/self/fd/*; do readlink $f; done").text.split()
        kinds = {name.partition(":")[0] for name in found}
        assert kinds == {"pipe"} or kinds == {"pipe", f"/proc/{shell.run('echo $$').text.strip()}/fd"}

    def test_a_sandbox_without_bash_says_so(self) -> None:
        with Sandbox(Policy(exec=["/usr/bin/true"])) as box, box.shell() as shell:
            result = shell.run("true")
            assert (result.outcome, result.exit_code) == ("denied", 126)
            assert "bash" in result.reason

    def test_few_descriptors_are_enough(self) -> None:
        with Sandbox(Policy(limits={"files": 32})) as box, box.shell() as shell:
            shell.run("X=1; exit 3")
            assert shell.run("echo $X").text == "1\n"

    def test_after_its_end_or_that_of_its_sandbox_nothing_runs(self) -> None:
        with Sandbox() as box:
            shell, other = box.shell(), box.shell()
            shell.run("true")
            other.run("true")
            shell.close()
            shell.close()
            with pytest.raises(SetupError, match="shell was closed"):
                shell.run("true")
        with pytest.raises(SetupError, match="not open"):
            other.run("true")
        other.close()

    def test_a_closed_sandbox_ends_the_run(self) -> None:
        box = Sandbox()
        box.open()
        shell, seen = box.shell(), threading.Event()
        results = []

        def run() -> None:
            results.append(shell.run("echo up; sleep 60", on_stdout=lambda _: seen.set()))

        running = threading.Thread(target=run)
        running.start()
        assert seen.wait(30)
        box.close()
        running.join()
        assert (results[0].outcome, results[0].text) == ("cancelled", "up\n")
        shell.close()


class TestTheFirstProcess:
    def test_it_is_process_two_and_its_end_is_that_of_its_run_alone(self) -> None:
        with Sandbox() as box:
            with box.shell(first=True) as shell:
                assert shell.run("echo $$ $PPID").text == "2 1\n"
                assert shell.run("sleep 60", timeout=0.2).outcome == "timed-out"
                shell.run("setsid sleep 1111 >/dev/null 2>&1 & disown")
                box.run(["sh", "-c", "setsid sleep 2222 >/dev/null 2>&1 &"])
                while box.run(["pgrep", "-cx", "sleep"]).text != "2\n":
                    pass
                assert shell.run("echo $$; exit 3").text == "2\n"
                box.pause()
                box.resume()
            while (found := box.run(["pgrep", "-ax", "sleep"]).text.splitlines()) != found[-1:]:
                pass
            assert found[0].endswith("2222")

    def test_time_is_kept_and_used_up_as_by_any(self) -> None:
        code = "(trap '' TERM; while :; do :; done) & trap '' INT TERM; while :; do :; done"
        with Sandbox() as box, box.shell(first=True) as shell:
            result = shell.run(code, timeout=0.2, grace=0.1)
            assert result.outcome == "timed-out" and result.usage.cpu > 0.1
            assert "first process" in result.hint
            assert box.run(["pgrep", "bash"]).exit_code == 1

    def test_it_is_refused_where_that_number_is_taken(self) -> None:
        with Sandbox() as box, box.shell(first=True) as shell, box.shell(first=True) as other:
            shell.run("true")
            with pytest.raises(SetupError, match="has already had one") as caught:
                other.run("true")
            assert "new sandbox" in caught.value.hint
            shell.run("exec true")
            with pytest.raises(SetupError, match="has already had one"):
                shell.run("true")
            assert box.run(["true"]).ok

    def test_it_is_refused_without_bash_and_without_a_pid_namespace(self) -> None:
        with Sandbox(WITHOUT_BASH) as box, pytest.raises(SetupError, match="no bash inside"):
            box.shell(first=True).run("true")
        policy = Policy(backend="landlock", net="open", accept=list(Control))
        with Sandbox(policy) as box, pytest.raises(UnsupportedError, match="pid namespace"):
            box.shell(first=True).run("true")

    def test_the_same_with_await(self) -> None:
        async def main() -> str:
            async with AsyncSandbox() as box, box.shell(first=True) as shell:
                return (await shell.run("echo $$")).text

        assert asyncio.run(main()) == "2\n"


class TestWithoutBash:
    """Where the policy or the machine has no bash inside, `sh` serves, with less patience."""

    def test_what_stays_and_what_does_not_end_it(self) -> None:
        with Sandbox(WITHOUT_BASH) as box, box.shell() as shell:
            assert shell.run("X=kept; cd /usr; f() { echo f $1; }; echo $0").text == "sh\n"
            for code, status in (
                ("echo 'unclosed", 2), ("cat <<END\nwithout end", 0), ("if true; then", 2), ("}", 2),
                ("cat", 0), ("read x", 1), ("break", 0), ("continue", 0), ("(exit 3)", 3),
                ("sh -c 'kill -9 $$'", 137), ("IFS=0123456789", 0), ("sleep 60 & true", 0),
                ("OLD=$_stockade", 0), ("printf '\\n%s 0 0\\n' $OLD no-number >&9; (exit 4)", 4),
                ("set -x", 0), ("set +x", 0),
            ):  # fmt: skip
                result = shell.run(code, timeout=20)
                assert (result.outcome, result.exit_code) == ("exited", status), code
                assert shell.run('echo "$X"; pwd; f a').text == "kept\n/usr\nf a\n", code

    def test_what_ends_it_is_said_and_the_next_run_has_a_fresh_one(self) -> None:
        with Sandbox(WITHOUT_BASH) as box, box.shell() as shell:
            for code, outcome, status in (
                ("exit 7", "exited", 7),
                ("set -e; false; echo no", "exited", 1),
                ('for n in 3 4 5 6 7 8 9; do eval "exec $n>&-"; done; (exit 6)', "exited", 6),
                ("kill -9 $$", "signalled", 137),
                ("sleep 60", "timed-out", 124),
            ):
                shell.run("X=kept")
                result = shell.run(code, timeout=0.3 if "sleep" in code else 20)
                assert (result.outcome, result.exit_code) == (outcome, status)
                assert result.reason.startswith("the shell ended") and "fresh" in result.hint
                assert shell.run("echo [$X]").text == "[]\n"

    def test_input_and_variables_are_those_of_one_run_byte_for_byte(self) -> None:
        with Sandbox(WITHOUT_BASH) as box, box.shell() as shell:
            value = "a'b\"\\c$d é\n\n"
            result = shell.run("cat; printenv K", input=EVERY_BYTE, env={"K": value})
            assert result.stdout == EVERY_BYTE + value.encode() + b"\n"
            assert shell.run("echo [$K]; echo 'é' >&2").stderr == "é\n".encode()

    def test_the_same_with_await(self) -> None:
        async def main() -> tuple[str, int]:
            async with AsyncSandbox(WITHOUT_BASH) as box, box.shell() as shell:
                await shell.run("X=1")
                return (await shell.run("echo $0 $X")).text, (await shell.run("exit 3")).exit_code

        assert asyncio.run(main()) == ("sh 1\n", 3)


class TestTime:
    @pytest.mark.parametrize(
        "code", ["sleep 60; echo no", "while :; do :; done", "f() { cat | sleep 60; }; f", "read x < /tmp/p"]
    )
    def test_the_foreground_is_interrupted_and_the_shell_stays(self, shell: Shell, code: str) -> None:
        shell.run("mkfifo /tmp/p; cd /usr; X=1; (sleep 60; true) & BG=$!")
        result = shell.run(code, timeout=0.3)
        assert (result.outcome, result.exit_code, result.text) == ("timed-out", 124, "")
        assert "0.3 s" in result.reason and "the shell ended" not in result.reason
        assert shell.run("pwd; echo $X; kill -0 $BG && echo lives").text == "/usr\n1\nlives\n"

    def test_an_interrupt_at_any_moment_leaves_the_shell_what_it_knows(self, shell: Shell) -> None:
        """Also one that comes just before a call that waits, or while bash writes its variables down."""
        shell.run("mkfifo /tmp/p; X=1")
        for milliseconds in range(1, 31):
            shell.run("read x < /tmp/p", timeout=milliseconds / 5000 + 0.001)
            assert shell.run("echo $X").text == "1\n"

    def test_what_ignores_that_is_killed_after_the_grace_and_older_jobs_stay(self, shell: Shell) -> None:
        shell.run("sleep 60 & BG=$!")
        result = shell.run("trap '' INT; sleep 60", timeout=0.2, grace=0.2)
        assert result.outcome == "timed-out" and 0.4 <= result.usage.wall < 2
        assert shell.run("kill -0 $BG && echo lives").text == "lives\n"

    @pytest.mark.parametrize(
        "code", ["trap '' INT TERM; while :; do :; done", "builtin() { :; }; true", "set -n"]
    )
    def test_a_shell_that_does_not_come_back_is_ended(
        self, shell: Shell, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange, "ANSWER", 0.2)
        result = shell.run(code, timeout=0.2, grace=0)
        assert (result.outcome, result.exit_code) == ("timed-out", 124)
        assert result.reason.startswith("the shell ended")
        assert shell.run("echo fresh").text == "fresh\n"

    def test_the_policys_time_holds_for_each_run(self) -> None:
        with Sandbox(Policy(limits={"wall": 0.4})) as box, box.shell() as shell:
            for _ in range(3):
                assert shell.run("X=1; sleep 0.2").ok
            assert shell.run("sleep 60").outcome == "timed-out"
            assert shell.run("echo $X").text == "1\n"

    def test_the_keeper_keeps_the_time_when_the_supervisor_does_not(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange, "LATE", 0.1)
        monkeypatch.setattr(exchange, "ANSWER", 0.1)
        monkeypatch.setattr(exchange.Ladder, "check", lambda _: None)
        monkeypatch.setattr(exchange.Ladder, "patience", lambda _: None)
        result = shell.run("sleep 60", timeout=0.1, grace=0)
        assert result.outcome == "timed-out" and result.usage.wall < 5
        assert shell.run("echo fresh").text == "fresh\n"

    def test_a_callback_that_fails_interrupts_the_run(self, shell: Shell) -> None:
        def fail(_: bytes) -> None:
            raise ZeroDivisionError

        shell.run("X=1")
        with pytest.raises(ZeroDivisionError):
            shell.run("echo x; sleep 60", on_stdout=fail)
        assert shell.run("echo $X").text == "1\n"

    def test_a_late_interrupt_never_reaches_the_next_run(self, shell: Shell) -> None:
        for turn in range(30):
            shell.run(f"sleep 0.0{turn % 3 + 1}", timeout=0.02)
            result = shell.run("sleep 0.005; echo whole")
            assert (result.exit_code, result.text) == (0, "whole\n")


class TestLies:
    """The shell is made of the code it runs: it can lie about itself, and that is all."""

    def test_its_own_exit_code(self, shell: Shell) -> None:
        result = shell.run(f"printf '\\n%s 42 0\\n' $_stockade >&{ANSWERS}; false")
        assert (result.outcome, result.exit_code) == ("exited", 42)

    @pytest.mark.parametrize(
        "said",
        [
            "printf '\\n%s 0 0\\n' 0123456789abcdef01234567",
            "printf 'no line end'",
            "head -c 3000000 /dev/zero",
            'yes "$OLD 0 0" | head -n 10000',
            "printf '\\n%s' $_stockade; printf '\\n%s 1' $_stockade; printf '\\n%s x y\\n' $_stockade",
            "printf '\\n%s %s 0\\n' $_stockade 99999999999999999999999999999999999999999999999999",
        ],
    )
    def test_what_is_no_answer_is_passed_over(self, shell: Shell, said: str) -> None:
        shell.run("OLD=$_stockade")
        result = shell.run(f"{{ {said}; }} >&{ANSWERS}; echo out; (exit 5)", timeout=20)
        assert (result.outcome, result.exit_code, result.text) == ("exited", 5, "out\n")

    def test_an_answer_that_announces_more_than_it_may_ends_it(self, shell: Shell) -> None:
        result = shell.run(f"printf '\\n%s 0 99999999999\\n' $_stockade >&{ANSWERS}; sleep 60", timeout=30)
        assert result.outcome == "cancelled" and shell.run("echo fresh").text == "fresh\n"

    def test_a_job_of_an_earlier_run_cannot_answer_for_a_later_one(self, shell: Shell) -> None:
        shell.run(f"while printf '\\n%s 0 0\\n' $_stockade >&{ANSWERS}; do :; done & mkfifo /tmp/never")
        for n in range(5):
            assert shell.run(f"(exit {n})", timeout=20).exit_code == n

    def test_printing_what_was_sent_changes_nothing(self, shell: Shell) -> None:
        result = shell.run("declare -p | grep -a _stockade; declare -p _stockade_c; (exit 3)")
        assert result.exit_code == 3 and b"_stockade_c" in result.stdout
        assert shell.run("printf '\\n%s 9 0\\n' $_stockade").exit_code == 0

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
    def test_an_answer_may_come_in_pieces(self, size: int) -> None:
        said = b"junk\nabc x\n" * 30 + b"\nabc 7 5\nhello and more"
        answers, told = Answers(b"abc", 10), None
        for start in range(0, len(said), size):
            told = told or answers.feed(said[start : start + size])
        assert told == DriverReply(7, b"hello")


class TestResults:
    def test_time_of_the_processor_and_changes_are_the_runs(self, tmp_path: Path) -> None:
        (tmp_path / "w").mkdir()
        with Sandbox(Policy(workspace=tmp_path / "w"), on_exit="discard") as box, box.shell() as shell:
            busy = shell.run("i=0; while ((i++ < 60000)); do :; done; echo 1 > made")
            idle = shell.run("true")
        assert busy.usage.cpu >= 0.02 > idle.usage.cpu
        assert busy.usage.source["cpu"] == "proc"
        assert [change.path for change in busy.changes] == ["made"]
        assert busy.controls and busy.plan

    def test_threads_take_turns(self, shell: Shell) -> None:
        shell.run("n=0")
        threads = [
            threading.Thread(target=lambda: [shell.run("m=$n; sleep 0.001; n=$((m+1))") for _ in range(5)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shell.run("echo $n").text == "20\n"

    def test_several_shells_and_commands_share_one_sandbox(self) -> None:
        with Sandbox() as box, box.shell() as one, box.shell() as other:
            one.run("X=1; echo 1 > /tmp/x")
            assert other.run("cat /tmp/x; echo [$X]").text == "1\n[]\n"
            assert box.run(["cat", "/tmp/x"]).text == "1\n"


class TestAsync:
    def test_the_same_with_await(self) -> None:
        async def main() -> list[str]:
            async with AsyncSandbox() as box, box.shell() as one, box.shell() as other:
                await one.run("cd /usr; X=1")
                both = await asyncio.gather(one.run("pwd; cat", input=b"in"), other.run("echo [$X]"))
                late = await one.run("sleep 60", timeout=0.2)
                last = await one.run("exit 3")
                return [
                    both[0].text,
                    both[1].text,
                    late.outcome,
                    str(last.exit_code),
                    (await one.run("pwd")).text,
                ]

        assert asyncio.run(main()) == ["/usr\nin", "[]\n", "timed-out", "3", "/usr\n"]

    def test_a_cancelled_run_is_interrupted_and_the_shell_stays(self) -> None:
        async def main() -> str:
            async with AsyncSandbox() as box, box.shell() as shell:
                await shell.run("X=1")
                seen = asyncio.Event()
                running = asyncio.create_task(shell.run("echo up; sleep 60", on_stdout=lambda _: seen.set()))
                await seen.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                return (await shell.run("echo $X")).text

        assert asyncio.run(main()) == "1\n"


def test_who_is_given_the_number_of_a_driver_that_has_ended_is_not_taken_for_it() -> None:
    """A supervisor that was stopped meanwhile would else signal the children of somebody on the host."""
    driver = subprocess.Popen(["true"])
    held = os.pidfd_open(driver.pid)
    since = proctree.Moment.now()
    driver.wait()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not proctree.find_below(os.getpid(), held, since)
        assert child.poll() is None and proctree.look(child.pid) is not None
        own = os.pidfd_open(os.getpid())
        proctree.signal_each(proctree.find_below(os.getpid(), own, since), signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    for descriptor in (held, own):
        os.close(descriptor)


@pytest.mark.parametrize("hide", [False, True])
def test_a_directory_for_one_run_leaves_the_shell_where_it_was(hide: bool) -> None:
    policy = Policy(deny=["/bin/bash", "/usr/bin/bash"]) if hide else Policy()
    with Sandbox(policy) as box, box.shell() as shell:
        assert shell.run("cd /tmp").ok
        found = shell.run("pwd; sh -c 'exit 3'", cwd="/usr/bin", env={"A": "1"})
        assert (found.text, found.exit_code) == ("/usr/bin\n", 3)
        assert shell.run("pwd; echo ${A-unset}").text == "/tmp\nunset\n"
        missing = shell.run("echo no", cwd="/no such")
        assert missing.exit_code != 0 and missing.text == "" and "/no such" in missing.stderr_text
        assert shell.run("pwd").text == "/tmp\n"
        if not hide:
            assert shell.run("cd /; exit 4", cwd="/usr").exit_code == 4
            assert shell.run("pwd; echo ${_stockade_d-unset}").text == "/tmp\nunset\n"
