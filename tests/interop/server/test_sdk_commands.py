"""The published Python SDK, unmodified: commands and bash sessions."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd import OutputMessage, RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync

NOBODY = 65534


def joined(messages: list[OutputMessage]) -> str:
    return "".join(message.text for message in messages)


def test_output_streams_are_apart_and_complete(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run("echo out; echo err >&2; printf 'no end'")
    assert joined(done.logs.stdout) == "out\nno end" and joined(done.logs.stderr) == "err\n"
    assert (done.exit_code, done.error) == (0, None) and done.complete is not None and done.id


def test_a_failure_has_its_exit_code_and_no_completion(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run("echo before; exit 3")
    assert done.exit_code == 3 and done.complete is None and done.text == "before"
    assert done.error is not None and (done.error.name, done.error.value) == ("CommandExecError", "3")


def test_a_command_that_is_not_there_is_exit_code_127(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run("no-such-program")
    assert done.exit_code == 127 and "no-such-program" in joined(done.logs.stderr)


def test_words_are_not_read_by_a_shell(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run(["printf", "%s|", "a b", "$HOME", "*"])
    assert joined(done.logs.stdout) == "a b|$HOME|*|"


def test_every_line_is_an_event_with_its_ending(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run("for i in $(seq 512); do echo line-$i; done; echo; printf 'a\\r\\nb'")
    assert [one.text for one in done.logs.stdout[:512]] == [f"line-{i}\n" for i in range(1, 513)]
    assert joined(done.logs.stdout[512:]) == "\na\r\nb"


def test_handlers_see_events_as_they_come(sandbox: SandboxSync) -> None:
    seen: list[tuple[str, float]] = []

    def note(name: str):
        return lambda _: seen.append((name, time.monotonic()))

    handlers = ExecutionHandlersSync(
        on_init=note("init"), on_stdout=note("stdout"), on_stderr=note("stderr"),
        on_execution_complete=note("complete"),
    )  # fmt: skip
    sandbox.commands.run("echo 1; sleep 0.5; echo 2 >&2", handlers=handlers)
    assert [name for name, _ in seen] == ["init", "stdout", "stderr", "complete"]
    assert seen[2][1] - seen[1][1] > 0.3


def test_the_environment_and_the_directory_of_one_command(sandbox: SandboxSync) -> None:
    opts = RunCommandOpts(envs={"COLOUR": "red"}, working_directory="/var")
    assert sandbox.commands.run("echo $COLOUR in $PWD", opts=opts).text == "red in /var"
    assert sandbox.commands.run("echo ${COLOUR:-none}").text == "none"


def test_a_directory_may_be_written_with_home_and_variables(sandbox: SandboxSync) -> None:
    opts = RunCommandOpts(working_directory="$BASE/tmp", envs={"BASE": ""})
    assert sandbox.commands.run("pwd", opts=opts).text == "/tmp"
    assert sandbox.commands.run("pwd", opts=RunCommandOpts(working_directory="~")).text == "/root"


def test_commands_start_where_relative_files_are(sandbox: SandboxSync) -> None:
    sandbox.files.write_file("script.py", "print('Hello World')")
    assert sandbox.commands.run("python3 script.py").text == "Hello World"


def test_a_command_runs_as_root_of_the_sandbox(sandbox: SandboxSync) -> None:
    assert sandbox.commands.run("id -u; id -g").text == "0\n0"


def test_a_command_may_run_as_another_user(sandbox: SandboxSync, other_ids: None) -> None:
    opts = RunCommandOpts(uid=NOBODY, gid=NOBODY)
    assert sandbox.commands.run("id -u; id -g; id -G", opts=opts).text == f"{NOBODY}\n" * 2 + str(NOBODY)


def test_time_that_is_over_ends_the_command(sandbox: SandboxSync) -> None:
    start = time.monotonic()
    done = sandbox.commands.run(
        "echo began; sleep 30", opts=RunCommandOpts(timeout=timedelta(milliseconds=500))
    )
    assert time.monotonic() - start < 10
    assert done.error is not None and done.complete is None and done.text == "began"


def test_interrupt_ends_a_command_and_its_stream(sandbox: SandboxSync) -> None:
    started = threading.Event()
    ids: list[str] = []

    def begin(init) -> None:
        ids.append(init.id)
        started.set()

    def stop() -> None:
        assert started.wait(10)
        sandbox.commands.interrupt(ids[0])

    stopper = threading.Thread(target=stop)
    stopper.start()
    start = time.monotonic()
    done = sandbox.commands.run("sleep 30", handlers=ExecutionHandlersSync(on_init=begin))
    stopper.join()
    assert time.monotonic() - start < 10 and (done.error is not None or done.complete is not None)


def test_a_background_command_has_status_and_logs(sandbox: SandboxSync) -> None:
    start = time.monotonic()
    begun = sandbox.commands.run(
        "echo first; sleep 1; echo second >&2; exit 4", opts=RunCommandOpts(background=True)
    )
    assert begun.id and time.monotonic() - start < 1
    assert sandbox.commands.get_command_status(begun.id).running
    while (status := sandbox.commands.get_command_status(begun.id)).running:
        time.sleep(0.05)
    assert status.exit_code == 4 and status.finished_at is not None and status.id == begun.id
    logs = sandbox.commands.get_background_command_logs(begun.id)
    assert logs.content == "first\nsecond\n" and logs.cursor is not None
    rest = sandbox.commands.get_background_command_logs(begun.id, cursor=logs.cursor)
    assert rest.content == "" and rest.cursor == logs.cursor


def test_a_background_command_can_be_interrupted(sandbox: SandboxSync) -> None:
    begun = sandbox.commands.run("sleep 60", opts=RunCommandOpts(background=True))
    assert begun.id
    sandbox.commands.interrupt(begun.id)
    end = time.monotonic() + 10
    while sandbox.commands.get_command_status(begun.id).running:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_status_of_a_foreground_command_is_known_too(sandbox: SandboxSync) -> None:
    done = sandbox.commands.run("true")
    assert done.id
    status = sandbox.commands.get_command_status(done.id)
    assert (status.running, status.exit_code) == (False, 0)


def test_an_unknown_command_is_a_404(sandbox: SandboxSync) -> None:
    with pytest.raises(SandboxApiException) as caught:
        sandbox.commands.get_command_status("nothing")
    assert caught.value.status_code == 404


@pytest.mark.parametrize("value", ["plain", "two words", "line one\nline two", "it's $HOME", 'say "hi"'])
def test_set_env_is_there_for_later_commands_and_sessions(sandbox: SandboxSync, value: str) -> None:
    sandbox.commands.set_env("KEPT", value)
    expected = value.replace("$HOME", "/root") if "'" in value else value
    assert joined(sandbox.commands.run('printf %s "$KEPT"').logs.stdout) == expected
    session = sandbox.commands.create_session()
    done = sandbox.commands.run_in_session(session, 'printf %s "$KEPT"')
    assert joined(done.logs.stdout) == expected
    sandbox.commands.delete_session(session)


def test_the_request_overrides_what_was_set(sandbox: SandboxSync) -> None:
    sandbox.commands.set_env("OVER", "file")
    assert sandbox.commands.run("echo $OVER", opts=RunCommandOpts(envs={"OVER": "request"})).text == "request"


def test_a_command_knows_its_sandbox(sandbox: SandboxSync) -> None:
    assert sandbox.commands.run("echo $OPENSANDBOX_ID").text == sandbox.id


def test_no_key_and_no_token_reaches_a_command(sandbox: SandboxSync, key: str) -> None:
    token = next(iter((sandbox.get_endpoint(44772).headers or {}).values()))
    seen = joined(
        sandbox.commands.run("env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'").logs.stdout
    )
    assert key not in seen and token not in seen


def test_a_session_keeps_its_exports(sandbox: SandboxSync) -> None:
    session = sandbox.commands.create_session(working_directory="/tmp")
    sandbox.commands.run_in_session(session, "export NAME=ada; here=1")
    assert sandbox.commands.run_in_session(session, "echo $NAME $here $PWD").text == "ada 1 /tmp"
    sandbox.commands.delete_session(session)
    with pytest.raises(SandboxException):
        sandbox.commands.run_in_session(session, "true")


def test_a_directory_of_one_run_in_a_session(sandbox: SandboxSync) -> None:
    session = sandbox.commands.create_session(working_directory="/tmp")
    done = sandbox.commands.run_in_session(session, "pwd", working_directory="/var")
    assert done.text == "/var"
    sandbox.commands.delete_session(session)


def test_the_exit_code_of_a_run_in_a_session(sandbox: SandboxSync) -> None:
    session = sandbox.commands.create_session()
    done = sandbox.commands.run_in_session(session, "sh -c 'exit 7'")
    assert done.exit_code == 7 and done.complete is None
    assert done.error is not None and done.error.name == "CommandExecError"
    assert sandbox.commands.run_in_session(session, "echo alive").text == "alive"
    sandbox.commands.delete_session(session)


def test_a_session_survives_a_run_whose_time_is_over(sandbox: SandboxSync) -> None:
    session = sandbox.commands.create_session()
    sandbox.commands.run_in_session(session, "export STILL=here")
    done = sandbox.commands.run_in_session(session, "sleep 30", timeout=timedelta(milliseconds=300))
    assert done.error is not None
    assert sandbox.commands.run_in_session(session, "echo $STILL").text == "here"
    sandbox.commands.delete_session(session)
