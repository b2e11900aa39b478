"""Commands over HTTP: streams, ends, the background, interrupts, variables and metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from support.event_streams import CUTS, KEEPS, EventsRead, command
from support.server import ServedSandbox, ServerUnderTest, module_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(scope="module")
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox(env={"COLOUR": "red"}) as found:
        yield found


def test_a_command_streams_both_outputs_and_one_end(box: ServedSandbox) -> None:
    found = command(box.execd, "echo out; echo err >&2; sleep 0.1; echo more")
    assert found.texts("stderr") == ["err\n"] and found.texts() == ["out\n", "more\n"]
    assert found.types[0] == "init" and found.exit_code == 0
    assert type(found.events[-1]["execution_time"]) is int and found.events[-1]["execution_time"] >= 100


def test_a_failing_command_has_one_error_with_its_exit_code_as_text(box: ServedSandbox) -> None:
    found = command(box.execd, "exit 3")
    assert found.exit_code == 3
    assert found.error["ename"] == "CommandExecError" and found.error["evalue"] == "3"
    assert type(found.error["traceback"]) is list


def test_frames_are_bare_json_with_a_blank_line_after_each(box: ServedSandbox) -> None:
    answer = box.execd.post("/command", json={"command": "printf 'a\\n\\nb'"}, headers=KEEPS)
    frames = answer.text.split("\n\n")
    assert frames[-1] == "" and all(frame.startswith("{") and "\n" not in frame for frame in frames[:-1])


def test_line_endings_follow_the_client(box: ServedSandbox) -> None:
    text = r"printf 'one\n\ntwo\r\n\xc3\xa9\xff\nrest'"
    assert command(box.execd, text).texts() == ["one\n", "\n", "two\r\n", "é�\n", "rest"]
    assert command(box.execd, text, CUTS).texts() == ["one", "\n", "two", "é�", "rest"]


def test_output_cannot_forge_an_event(box: ServedSandbox) -> None:
    forged = '{"type":"execution_complete","execution_time":1,"timestamp":1}'
    found = command(box.execd, f"printf '%s\\n\\n' '{forged}'; echo '{forged}' >&2; exit 3")
    assert found.exit_code == 3 and found.texts() == [f"{forged}\n", "\n"]


def test_a_wrong_path_fails_one_command_and_not_the_next(box: ServedSandbox) -> None:
    assert command(box.execd, "true", envs={"PATH": "/nowhere"}).exit_code == 127
    assert command(box.execd, "echo $BASH").texts() != ["\n"]


def test_many_lines_are_many_events(box: ServedSandbox) -> None:
    assert command(box.execd, "seq 512", CUTS).texts() == [str(number) for number in range(1, 513)]


def test_argv_starts_no_shell(box: ServedSandbox) -> None:
    answer = box.execd.post("/command", json={"argv": ["echo", "$HOME", "a  b"]}, headers=KEEPS)
    assert EventsRead(answer).texts() == ["$HOME a  b\n"]


def test_a_program_that_does_not_exist_is_an_error_with_127(box: ServedSandbox) -> None:
    answer = box.execd.post("/command", json={"argv": ["no-such-program"]})
    assert EventsRead(answer).exit_code == 127


def test_the_directory_is_expanded(box: ServedSandbox) -> None:
    home = command(box.execd, "echo $HOME").texts()
    assert command(box.execd, "pwd", cwd="~").texts() == home
    assert command(box.execd, "pwd", cwd="$PLACE/bin", envs={"PLACE": "/usr"}).texts() == ["/usr/bin\n"]
    assert command(box.execd, "pwd", cwd="/no such directory").exit_code != 0


def test_variables_come_from_the_sandbox_the_file_and_the_request(box: ServedSandbox) -> None:
    shown = 'echo "$COLOUR/$SIZE/$OPENSANDBOX_ID"'
    assert command(box.execd, shown).texts() == [f"red//{box.id}\n"]
    entry = """printf '%s\\n' "SIZE='a b'" 'COLOUR="$COLOUR-ish"' >> "$EXECD_ENVS" """
    assert command(box.execd, 'mkdir -p "$(dirname "$EXECD_ENVS")"; ' + entry).exit_code == 0
    assert command(box.execd, shown).texts() == [f"red-ish/a b/{box.id}\n"]
    assert command(box.execd, shown, envs={"SIZE": "9"}).texts() == [f"red-ish/9/{box.id}\n"]
    assert command(box.execd, 'rm "$EXECD_ENVS"').exit_code == 0


@pytest.mark.parametrize("make", ["mkfifo $EXECD_ENVS", "mkdir $EXECD_ENVS", "ln -s /dev/zero $EXECD_ENVS"])
def test_a_file_of_variables_that_is_no_file_changes_nothing(box: ServedSandbox, make: str) -> None:
    assert command(box.execd, make).exit_code == 0
    began = time.monotonic()
    assert command(box.execd, "rm -rf $EXECD_ENVS; echo $COLOUR").texts() == ["red\n"]
    assert time.monotonic() - began < 10


def test_the_time_limit_ends_a_command(box: ServedSandbox) -> None:
    began = time.monotonic()
    found = command(box.execd, "echo before; sleep 60", timeout=300)
    assert found.texts() == ["before\n"] and found.exit_code == 124
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": ""},
        {"command": "true", "argv": ["true"]},
        {"argv": []},
        {"argv": "ls"},
        {"command": "a\0b"},
        {"command": "true", "gid": 5},
        {"command": "true", "uid": -1},
        {"command": "true", "timeout": -5},
        {"command": "true", "timeout": "soon"},
        {"command": "true", "envs": {"A=B": "x"}},
        {"command": "true", "envs": {"A": 1}},
        {"command": "true", "cwd": "a\0"},
        [],
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_with_the_field(box: ServedSandbox, body: object) -> None:
    answer = box.execd.post("/command", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == "INVALID_REQUEST_BODY" and answer.json()["message"]


def test_a_command_in_the_background_ends_its_stream_at_once_and_has_logs(box: ServedSandbox) -> None:
    began = time.monotonic()
    found = command(box.execd, "echo one; sleep 1; echo two >&2; exit 4", background=True)
    assert time.monotonic() - began < 1 and found.types == ["init", "execution_complete"]
    status = box.execd.get(f"/command/status/{found.id}").json()
    assert status["running"] is True and "exit_code" not in status and "finished_at" not in status
    wait_until(lambda: not box.execd.get(f"/command/status/{found.id}").json()["running"])
    status = box.execd.get(f"/command/status/{found.id}").json()
    assert (status["id"], status["exit_code"]) == (found.id, 4)
    assert status["content"].startswith("echo one") and status["error"] and status["finished_at"]
    logs = box.execd.get(f"/command/{found.id}/logs")
    assert logs.text == "one\ntwo\n" and logs.headers["content-type"].startswith("text/plain")
    assert logs.headers["EXECD-COMMANDS-TAIL-CURSOR"] == "8"
    later = box.execd.get(f"/command/{found.id}/logs", params={"cursor": 4})
    assert later.text == "two\n"
    nothing = box.execd.get(f"/command/{found.id}/logs", params={"cursor": 8})
    assert nothing.text == "" and nothing.headers["EXECD-COMMANDS-TAIL-CURSOR"] == "8"
    assert box.execd.get(f"/command/{found.id}/logs", params={"cursor": "x"}).status_code == 400


def test_a_log_keeps_the_newest_bytes_and_nothing_else_of_the_output_is_kept(
    box: ServedSandbox, server: ServerUnderTest
) -> None:
    found = command(box.execd, "head -c 40M /dev/zero; echo end", background=True)
    wait_until(lambda: not box.execd.get(f"/command/status/{found.id}").json()["running"], 30)
    page = box.execd.get(f"/command/{found.id}/logs")
    assert page.headers["EXECD-COMMANDS-TAIL-CURSOR"] == str((40 << 20) + 4)
    assert len(page.content) == 16 << 20 and page.content.endswith(b"\0end\n")
    assert not (server.home / "output").exists()


def test_a_sandbox_with_a_stubborn_command_is_deleted_at_once(server: ServerUnderTest) -> None:
    with server.sandbox() as stubborn:
        found = command(stubborn.execd, "trap '' TERM INT; while :; do sleep 1; done", background=True)
        assert stubborn.execd.get(f"/command/status/{found.id}").json()["running"]
        began = time.monotonic()
        assert server.http.delete(f"/v1/sandboxes/{stubborn.id}").status_code == 204
        assert time.monotonic() - began < 1.9


def test_a_command_in_the_foreground_has_a_status_and_no_logs(box: ServedSandbox) -> None:
    found = command(box.execd, "exit 7")
    assert box.execd.get(f"/command/status/{found.id}").json()["exit_code"] == 7
    assert box.execd.get(f"/command/{found.id}/logs").status_code == 400


@pytest.mark.parametrize("path", ["/command/status/x", "/command/x/logs"])
def test_an_unknown_command_is_not_found(box: ServedSandbox, path: str) -> None:
    assert box.execd.get(path).status_code == 404
    assert box.execd.delete("/command", params={"id": "x"}).status_code == 404
    assert box.execd.delete("/command").json()["code"] == "MISSING_QUERY"


def test_an_interrupt_ends_the_stream_with_a_terminal_event(box: ServedSandbox) -> None:
    with box.execd.stream("POST", "/command", json={"command": "echo $$; sleep 60"}) as answer:
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        identifier = next(lines)["text"]
        assert next(lines)["type"] == "stdout"
        stopped = box.execd.delete("/command", params={"id": identifier})
        assert stopped.status_code == 200 and stopped.headers["content-length"] == "0"
        began = time.monotonic()
        rest = list(lines)
    assert [event["type"] for event in rest if event["type"] != "ping"] == ["error"]
    assert time.monotonic() - began < 5
    assert box.execd.delete("/command", params={"id": identifier}).status_code == 200


def test_a_client_that_leaves_ends_its_command(box: ServedSandbox) -> None:
    with box.execd.stream("POST", "/command", json={"command": "echo begun; sleep 61"}) as answer:
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        identifier = next(lines)["text"]
        assert box.execd.get(f"/command/status/{identifier}").json()["running"]
    wait_until(lambda: not box.execd.get(f"/command/status/{identifier}").json()["running"])
    assert command(box.execd, "pgrep -f 'sleep 6[1]'").texts() == []


def test_a_client_that_reads_slowly_makes_the_program_wait(box: ServedSandbox) -> None:
    endless = {"command": "exec 3>/tmp/written; while :; do head -c 1M /dev/zero; echo -n x >&3; done"}
    with box.execd.stream("POST", "/command", json=endless):
        time.sleep(1.5)
        first = len("".join(command(box.execd, "cat /tmp/written").texts()))
        time.sleep(1)
        assert len("".join(command(box.execd, "cat /tmp/written").texts())) == first < 100


def test_a_command_runs_as_any_user_that_the_sandbox_has(server: ServerUnderTest, box: ServedSandbox) -> None:
    if server.http.get("/v1/capabilities").json()["several_ids"]:
        assert command(box.execd, "id -u; id -g; id -G", uid=1234, gid=77).texts() == [
            "1234\n",
            "77\n",
            "77\n",
        ]
        assert command(box.execd, "id -u; id -g", uid=1234).texts() == ["1234\n", "1234\n"]
    nobody = box.execd.post("/command", json={"command": "echo never", "uid": 4_000_000_000})
    assert nobody.status_code == 400
    assert nobody.json()["message"].startswith("uid: 4000000000 cannot be used here: ")


def test_the_code_interpreters_check_succeeds_at_once(box: ServedSandbox) -> None:
    probe = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}' && exit 0 || exit 1"
    wait_until(lambda: command(box.execd, probe).exit_code == 0)
    assert (
        command(box.execd, f"for n in {{1..50}}; do {probe.partition(' &&')[0]} || exit 1; done").exit_code
        == 0
    )


def test_no_command_reaches_the_servers_own_port(box: ServedSandbox) -> None:
    found = command(box.execd, f"exec 3<>/dev/tcp/127.0.0.1/{box.server.port}")
    assert found.exit_code != 0 and "refused" in found.texts("stderr")[0]


def test_silence_is_filled_with_pings(box: ServedSandbox) -> None:
    found = command(box.execd, "sleep 3.4")
    assert {"ping"} == {event["type"] for event in found.events} - {"init", "execution_complete"}


def test_metrics_are_within_their_totals(box: ServedSandbox) -> None:
    found = box.execd.get("/metrics").json()
    assert set(found) == {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"}
    assert 0 <= found["cpu_used_pct"] <= 100 and 0 < found["mem_used_mib"] <= found["mem_total_mib"]
    assert type(found["timestamp"]) is int


def test_metrics_are_those_of_the_sandbox_and_not_of_the_machine(server: ServerUnderTest) -> None:
    hold = "import time; held = bytearray(b'x' * (64 << 20)); print('held', flush=True); time.sleep(60)"
    with server.sandbox() as quiet:
        assert quiet.execd.get("/metrics").json()["mem_used_mib"] < 48  # the machine's would be more
        session = quiet.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}}).json()
        run = f"/v1/isolated/session/{session['session_id']}/run"
        quiet.execd.post(run, json={"code": f'python3 -c "{hold}" &'})
        wait_until(lambda: quiet.execd.get("/metrics").json()["mem_used_mib"] > 60)
        quiet.execd.delete(run.removesuffix("/run"))
        wait_until(lambda: quiet.execd.get("/metrics").json()["mem_used_mib"] < 48)
        quiet.execd.post("/command", json={"command": "while :; do :; done", "background": True})
        wait_until(lambda: quiet.execd.get("/metrics").json()["cpu_used_pct"] > 0.5)


def test_metrics_can_be_watched(box: ServedSandbox) -> None:
    with box.execd.stream("GET", "/metrics/watch") as answer:
        lines = answer.iter_lines()
        one, other = json.loads(next(lines)), json.loads(next(lines))
    assert 800 <= other["timestamp"] - one["timestamp"] <= 3000
