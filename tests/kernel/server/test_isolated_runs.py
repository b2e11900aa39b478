"""Runs of isolated sessions: what they print, what stays, what ends them, and what does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from support.isolated import SESSIONS, USER_AGENT, SessionUnderTest, events_of, isolated, until, warm_sandbox
from support.server import ServedSandbox, ServerUnderTest, module_server

EXITED = "session process has exited"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(scope="module")
def sandbox(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with warm_sandbox(server, env={"PLAIN": "1", "MY_API_KEY": "secret"}) as found:
        yield found


@pytest.fixture
def session(sandbox: ServedSandbox) -> Iterator[SessionUnderTest]:
    with isolated(sandbox) as found:
        yield found


class TestOutput:
    def test_defect_14_stderr_is_separate_and_blank_lines_are_kept(self, session: SessionUnderTest) -> None:
        found = session.run("echo a; echo; echo b; echo oops >&2; printf unterminated")
        assert (found.stdout, found.stderr) == ("a\n\nb\nunterminated", "oops\n")

    def test_a_stream_begins_with_init_and_has_one_terminal_event(self, session: SessionUnderTest) -> None:
        assert session.run("echo a").kinds == ["init", "stdout", "execution_complete"]
        assert session.run("echo a; exit 3").kinds == ["init", "stdout", "error"]

    def test_defect_15_error_events_have_the_object_with_the_exit_code(
        self, session: SessionUnderTest
    ) -> None:
        found = session.run("exit 3")
        assert (found.error["ename"], found.error["evalue"]) == ("ExitError", "3")
        assert isinstance(found.error["traceback"], list)

    def test_a_client_of_older_times_gets_lines_without_endings(self, session: SessionUnderTest) -> None:
        answer = session.http.post(f"{session.path}/run", json={"code": "echo a; echo; echo b"})
        assert [event.get("text") for event in events_of(answer.text)[1:4]] == ["a", "\n", "b"]

    def test_more_than_a_pipe_holds_arrives_whole(self, session: SessionUnderTest) -> None:
        found = session.run("seq 100000")
        assert found.stdout == "".join(f"{n}\n" for n in range(1, 100001))

    def test_nothing_that_code_prints_looks_like_the_end(self, session: SessionUnderTest) -> None:
        forged = '{"type":"execution_complete","execution_time":0,"timestamp":1}'
        found = session.run(f"printf '%s\\n\\n' '{forged}'; exit 7")
        assert found.exit_code == 7
        assert forged in found.stdout


class TestWhatStays:
    def test_the_shell_is_the_second_process(self, session: SessionUnderTest) -> None:
        assert session.text("echo $$") == "2\n"

    def test_directory_variables_and_functions(self, session: SessionUnderTest) -> None:
        session.text("cd /usr; X='a b'; export Y=y; f() { echo f-$1; }")
        assert session.text('pwd; echo "$X" $Y; f 1') == "/usr\na b y\nf-1\n"

    @pytest.mark.parametrize(
        ("code", "exit_code"),
        [("exit 7", 7), ("set -e; false; echo no", 1), ("set -eu; echo $NONE", 1), ("f() { exit 9; }; f", 9)],
    )
    def test_defect_5_exit_and_set_e_do_not_kill_the_session(
        self, session: SessionUnderTest, code: str, exit_code: int
    ) -> None:
        session.text("cd /usr; X=1")
        assert session.run(code).exit_code == exit_code
        assert session.text("pwd; echo $X") == "/usr\n1\n"

    def test_defect_6_variables_of_one_run_keep_cd_and_assignments(self, session: SessionUnderTest) -> None:
        assert session.text("cd /usr; Z=$ONCE; echo $ONCE", envs={"ONCE": "it's 1"}) == "it's 1\n"
        assert session.text("pwd; echo $Z") == "/usr\nit's 1\n"

    def test_defect_15_variables_of_one_run_do_not_leak(self, session: SessionUnderTest) -> None:
        session.text("export KEPT=before")
        session.text("true", envs={"ONCE": "1", "KEPT": "changed"})
        assert session.text('echo "${ONCE-unset} $KEPT"; env | grep -c ONCE || true') == "unset before\n0\n"

    @pytest.mark.parametrize("code", ["echo 'open", 'echo "open', "cat <<END\nno end", "if true", "$(", "("])
    def test_defect_4_an_open_quotation_or_heredoc_ends_its_own_run_only(
        self, session: SessionUnderTest, code: str
    ) -> None:
        session.text("X=1")
        session.run(code, timeout_seconds=20)
        assert session.text("echo $X") == "1\n"

    def test_defect_4_cat_finds_an_empty_stdin_and_nothing_else(self, session: SessionUnderTest) -> None:
        assert session.text("cat; read line || echo empty", timeout_seconds=20) == "empty\n"
        assert session.text("echo next") == "next\n"

    def test_background_jobs_go_on(self, session: SessionUnderTest) -> None:
        session.text("sleep 60 & echo $! > /tmp/pid")
        assert session.text("kill $(cat /tmp/pid) && echo killed") == "killed\n"

    def test_variables_of_the_sandbox_pass_but_no_secrets(self, sandbox: ServedSandbox) -> None:
        for rule in (
            None,
            {"mode": "deny", "keys": ["OTHER"]},
            {"mode": "allow", "keys": ["PLAIN", "MY_API_KEY"]},
        ):
            body = {} if rule is None else {"env_passthrough": rule}
            with isolated(sandbox, **body) as session:
                assert session.text('echo "$PLAIN ${MY_API_KEY-none}"') == "1 none\n"
        with isolated(sandbox, env_passthrough={"mode": "deny", "keys": ["PLAIN"]}) as session:
            assert session.text('echo "${PLAIN-none}"') == "none\n"


class TestEnds:
    def test_defect_3_a_timeout_keeps_the_session_and_its_state(self, session: SessionUnderTest) -> None:
        session.text("cd /usr; X=1")
        found = session.run("echo begun; sleep 60", timeout_seconds=1)
        assert found.stdout == "begun\n"
        assert (found.error["ename"], found.kinds[-1]) == ("TimeoutError", "error")
        assert session.text("pwd; echo $X") == "/usr\n1\n"

    def test_defect_3_code_that_ignores_the_interrupt_is_killed_after_a_while(
        self, session: SessionUnderTest
    ) -> None:
        session.text("X=1")
        began = time.monotonic()
        found = session.run("bash -c 'trap \"\" INT TERM; sleep 60; sleep 60'", timeout_seconds=1)
        assert found.error["ename"] == "TimeoutError"
        assert time.monotonic() - began < 30
        assert session.text("echo $X") == "1\n"

    def test_a_client_that_goes_away_interrupts_the_run(self, session: SessionUnderTest) -> None:
        session.text("X=1")
        with session.http.stream("POST", f"{session.path}/run", json={"code": "sleep 60; Y=2"}) as answer:
            next(answer.iter_raw())
        assert session.text("echo $X ${Y-unset}", timeout_seconds=20) == "1 unset\n"
        assert session.state()["status"] == "active"

    def test_the_id_of_init_interrupts_a_run(self, session: SessionUnderTest) -> None:
        with session.http.stream(
            "POST", f"{session.path}/run", json={"code": "sleep 60"}, headers=USER_AGENT
        ) as answer:
            pieces = answer.iter_text()
            (first,) = events_of(next(pieces))
            assert session.http.delete(f"{session.path}/runs/{first['text']}").status_code == 200
            (last,) = [event for event in events_of("".join(pieces)) if event["type"] != "ping"]
        assert last["error"]["ename"] == "Interrupted"
        assert session.text("echo on") == "on\n"

    @pytest.mark.parametrize("code", ["kill -9 $$", "exec sleep 0"])
    def test_defect_15_a_dead_session_says_so(self, session: SessionUnderTest, code: str) -> None:
        found = session.run(code)
        assert found.error["evalue"] == EXITED
        assert session.state()["status"] == "dead"
        assert session.run("echo a").error["evalue"] == EXITED

    def test_runs_take_turns(self, session: SessionUnderTest) -> None:
        seen: list[str] = []
        code = "echo $RANDOM > /tmp/n; was=$(cat /tmp/n); sleep 0.1; [ $was = $(cat /tmp/n) ] && echo ok"
        threads = [threading.Thread(target=lambda: seen.append(session.text(code))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == ["ok\n"] * 4

    def test_defect_15_a_run_in_a_session_that_is_not_there_is_a_404(self, sandbox: ServedSandbox) -> None:
        answer = sandbox.execd.post(f"{SESSIONS}/none/run", json={"code": "echo"})
        assert (answer.status_code, answer.json()["code"]) == (404, "SESSION_NOT_FOUND")

    @pytest.mark.parametrize(
        "body", [{}, {"code": ""}, {"code": "  "}, {"code": "a", "envs": {"A-B": ""}}, []]
    )
    def test_defect_15_a_run_without_code_is_a_400(self, session: SessionUnderTest, body: object) -> None:
        answer = session.http.post(f"{session.path}/run", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY")


class TestBackground:
    def test_it_has_the_shells_state_and_the_shell_stays_free(self, session: SessionUnderTest) -> None:
        session.text("mkdir d; cd d; X='a b'; f() { echo f; }")
        run = session.background('pwd; echo "$X $ONCE"; f; echo e >&2; sleep 60', envs={"ONCE": "1"})
        assert session.text("echo free") == "free\n"
        expected = b"/workspace/d\na b 1\nf\ne\n"
        until(lambda: session.http.get(f"{run}/logs").content == expected, "the log does not arrive")
        assert session.http.get(run).json()["running"] is True
        assert session.http.delete(run).status_code == 200
        until(lambda: not session.http.get(run).json()["running"], "the run does not end")
        assert session.http.get(run).json()["error"] == "interrupted"

    def test_its_end_is_known(self, session: SessionUnderTest) -> None:
        run = session.background("exit 4")
        until(lambda: not session.http.get(run).json()["running"], "the run does not end")
        found = session.http.get(run).json()
        assert (found["exit_code"], found["session_id"]) == (4, session.id)
        assert {"started_at", "finished_at"} <= set(found)
        assert "error" not in found

    def test_logs_are_read_from_a_byte_on(self, session: SessionUnderTest) -> None:
        run = session.background("printf 0123456789")
        until(lambda: not session.http.get(run).json()["running"], "the run does not end")
        page = session.http.get(f"{run}/logs", params={"cursor": 4})
        assert (page.content, page.headers["EXECD-ISOLATED-TAIL-CURSOR"]) == (b"456789", "10")
        page = session.http.get(f"{run}/logs", params={"cursor": 10})
        assert (page.content, page.headers["EXECD-ISOLATED-TAIL-CURSOR"]) == (b"", "10")
        assert session.http.get(f"{run}/logs", params={"cursor": -1}).status_code == 400

    def test_what_it_writes_is_in_the_session(self, session: SessionUnderTest) -> None:
        run = session.background("echo bg > /workspace/from-bg")
        until(lambda: not session.http.get(run).json()["running"], "the run does not end")
        assert session.text("cat /workspace/from-bg") == "bg\n"

    @pytest.mark.parametrize(
        "overlay", [{"path": "/workspace", "mode": "ro"}, {"path": "/workspace", "persist": False}]
    )
    def test_a_first_mount_that_keeps_nothing_refuses_it(
        self, sandbox: ServedSandbox, overlay: dict[str, object]
    ) -> None:
        with isolated(sandbox, overlays=[overlay]) as session:
            answer = session.http.post(f"{session.path}/run", json={"code": "true", "background": True})
            assert answer.status_code == 400, answer.text

    def test_it_ends_with_its_session(self, session: SessionUnderTest) -> None:
        run = session.background("sleep 60")
        session.run("kill -9 $$")
        until(lambda: not session.http.get(run).json()["running"], "the run does not end")
        assert session.http.get(run).json()["error"] == "session terminated"

    @pytest.mark.parametrize("run", ["none", "00000000-0000-4000-8000-000000000000"])
    def test_an_unknown_run_is_a_404(self, session: SessionUnderTest, run: str) -> None:
        for call in (session.http.get, session.http.delete):
            assert call(f"{session.path}/runs/{run}").status_code == 404
        assert session.http.get(f"{session.path}/runs/{run}/logs").status_code == 404

    def test_the_idle_clock_stands_still_during_one(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, idle_timeout_seconds=2) as session:
            run = session.background("sleep 3.2; echo done")
            until(lambda: b"done" in session.http.get(f"{run}/logs").content, "the session expired")


class TestIdleness:
    def test_a_session_that_nobody_uses_expires_and_leaves_nothing(
        self, server: ServerUnderTest, sandbox: ServedSandbox
    ) -> None:
        layers = server.home / "workspaces"
        before = set(os.listdir(layers))
        with isolated(sandbox, idle_timeout_seconds=1) as session:
            session.text("echo x > file")
            assert set(os.listdir(layers)) > before
            until(lambda: session.http.get(session.path).status_code == 404, "it does not expire")
            until(lambda: set(os.listdir(layers)) <= before, "its layer stays")

    def test_a_run_that_is_longer_than_the_timeout_keeps_it(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, idle_timeout_seconds=2) as session:
            assert session.text("sleep 2.6; echo on") == "on\n"
            assert session.text("echo again") == "again\n"

    def test_a_transfer_that_is_longer_than_the_timeout_keeps_it(self, sandbox: ServedSandbox) -> None:
        lines = [
            b"--x",
            b'Content-Disposition: form-data; name="metadata"; filename="m"',
            b"",
            b'{"path": "/workspace/slow"}',
            b"--x",
            b'Content-Disposition: form-data; name="file"; filename="f"',
            b"",
            b"",
        ]

        def slowly() -> Iterator[bytes]:
            yield b"\r\n".join(lines)
            for piece in (b"a", b"b", b"c"):
                time.sleep(0.6)
                yield piece
            yield b"\r\n--x--\r\n"

        with isolated(sandbox, idle_timeout_seconds=1) as session:
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            sent = session.http.post(f"{session.path}/files/upload", content=slowly(), headers=headers)
            assert sent.status_code == 200, sent.text
            assert session.text("cat slow") == "abc"

    def test_zero_is_never(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, idle_timeout_seconds=0) as session:
            state = session.state()
            assert "idle_remaining_seconds" not in state
            assert state["idle_timeout_seconds"] == 0


def test_a_deleted_session_ends_a_run_that_goes_on(sandbox: ServedSandbox) -> None:
    with (
        isolated(sandbox) as session,
        session.http.stream("POST", f"{session.path}/run", json={"code": "sleep 60"}) as answer,
    ):
        pieces = answer.iter_text()
        next(pieces)
        session.delete()
        assert '"error"' in "".join(pieces)


def test_every_run_has_a_receipt(server: ServerUnderTest, sandbox: ServedSandbox) -> None:
    with isolated(sandbox) as session:
        session.run("exit 3")
        rows = server.http.get(f"/v1/sandboxes/{sandbox.id}/receipts").json()["receipts"]
    assert (rows[-1]["program"], rows[-1]["outcome"]) == ("shell", "exited")
