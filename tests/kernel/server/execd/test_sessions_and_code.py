"""Bash sessions and code contexts over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.event_streams import KEEPS, EventsRead, command
from support.server import ServedSandbox, ServerUnderTest, module_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(scope="module")
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox() as found:
        yield found


@pytest.fixture(scope="module")
def session(box: ServedSandbox) -> str:
    return str(box.execd.post("/session").json()["session_id"])


def in_session(box: ServedSandbox, session: str, text: str, **more: Any) -> EventsRead:
    return EventsRead(
        box.execd.post(f"/session/{session}/run", json={"command": text, **more}, headers=KEEPS)
    )


def code(box: ServedSandbox, text: str, **context: str) -> EventsRead:
    return EventsRead(box.execd.post("/code", json={"code": text, "context": context}, headers=KEEPS))


def test_a_session_keeps_directory_and_variables(box: ServedSandbox, session: str) -> None:
    assert in_session(box, session, "cd /usr; export A=1").exit_code == 0
    assert in_session(box, session, "echo $PWD $A; sh -c 'exit 5'").texts() == ["/usr 1\n"]
    assert in_session(box, session, "sh -c 'exit 5'").exit_code == 5
    assert in_session(box, session, "false").error["ename"] == "CommandExecError"


def test_a_directory_holds_for_one_run(box: ServedSandbox, session: str) -> None:
    assert in_session(box, session, "cd /tmp").exit_code == 0
    assert in_session(box, session, "pwd", cwd="/usr/bin").texts() == ["/usr/bin\n"]
    assert in_session(box, session, "pwd").texts() == ["/tmp\n"]


def test_a_session_starts_where_it_is_told_with_the_variables_of_the_file(box: ServedSandbox) -> None:
    entry = """mkdir -p "$(dirname "$EXECD_ENVS")"; echo "SHAPE='round'" >> "$EXECD_ENVS" """
    assert command(box.execd, entry).exit_code == 0
    made = box.execd.post("/session", json={"cwd": "/usr/lib"})
    session = made.json()["session_id"]
    assert made.status_code == 200 and in_session(box, session, "echo $PWD $SHAPE").texts() == [
        "/usr/lib round\n"
    ]
    assert command(box.execd, 'rm "$EXECD_ENVS"').exit_code == 0
    ended = box.execd.delete(f"/session/{session}")
    assert ended.status_code == 200 and ended.headers["content-length"] == "0"
    assert box.execd.delete(f"/session/{session}").json()["code"] == "SESSION_NOT_FOUND"
    again = box.execd.post(f"/session/{session}/run", json={"command": "true"})
    assert again.status_code == 404 and again.json()["code"] == "SESSION_NOT_FOUND"
    assert box.execd.post("/session", json={"cwd": "/no such"}).status_code == 400


@pytest.mark.parametrize("text", ["exit 9", "set -e; false", "cat", "echo 'open", "cat <<EOF"])
def test_no_code_ends_or_blocks_a_session(box: ServedSandbox, session: str, text: str) -> None:
    began = time.monotonic()
    in_session(box, session, text, timeout=5000)
    assert in_session(box, session, "set +e; echo still here").texts() == ["still here\n"]
    assert time.monotonic() - began < 10


def test_a_session_survives_a_time_limit(box: ServedSandbox, session: str) -> None:
    in_session(box, session, "KEPT=1")
    assert in_session(box, session, "sleep 60", timeout=300).exit_code == 124
    assert in_session(box, session, "echo $KEPT").texts() == ["1\n"]


def test_a_session_survives_a_client_that_leaves(box: ServedSandbox, session: str) -> None:
    path, body = f"/session/{session}/run", {"command": "STAYED=1; echo begun; sleep 60"}
    with box.execd.stream("POST", path, json=body) as answer:
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        while next(lines)["type"] != "stdout":
            pass
    began = time.monotonic()
    assert in_session(box, session, "echo $STAYED").texts() == ["1\n"]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/session/{}/run", {}),
        ("/session/{}/run", {"command": " "}),
        ("/session/{}/run", {"command": "a\0"}),
        ("/session/{}/run", {"command": "true", "timeout": -1}),
        ("/code", {}),
        ("/code", {"code": "\n"}),
        ("/code", {"code": "1", "context": {"language": "cobol"}}),
        ("/code/context", {}),
        ("/code/context", {"language": "java"}),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(
    box: ServedSandbox, session: str, path: str, body: dict[str, Any]
) -> None:
    answer = box.execd.post(path.format(session), json=body)
    assert answer.status_code == 400 and answer.json()["message"], answer.text


def test_python_has_values_counts_and_both_streams(box: ServedSandbox) -> None:
    context = box.execd.post("/code/context", json={"language": "python"}).json()
    assert context["language"] == "python"
    chosen = {"id": context["id"], "language": "python"}
    one = code(box, "import sys\nx = 2\nprint('out'); print('err', file=sys.stderr)\nx + x", **chosen)
    assert one.id == context["id"]
    assert (one.texts(), one.texts("stderr")) == (["out\n"], ["err\n"])
    assert one.types[-3:] == ["execution_count", "result", "execution_complete"]
    assert one.events[-2]["results"] == {"text": "4"} and one.events[-3]["execution_count"] == 1
    two = code(box, "x * 5", **chosen)
    assert [event["results"]["text"] for event in two.events if event["type"] == "result"] == ["10"]
    assert [event["execution_count"] for event in two.events if event["type"] == "execution_count"] == [2]


def test_code_is_framed_as_one_object_per_line(box: ServedSandbox) -> None:
    answer = box.execd.post("/code", json={"code": "print('a\\n\\nb')\n'\\u2028'"})
    lines = answer.text.splitlines()
    assert lines and all(type(json.loads(line)) is dict for line in lines)


def test_rich_values_are_texts_under_their_types(box: ServedSandbox) -> None:
    html = "class H:\n    def _repr_html_(self):\n        return '<b>1</b>'\nH()"
    png = "class P:\n    def _repr_png_(self):\n        return b'\\x89PNG'\nP()"
    (found,) = [event["results"] for event in code(box, html).events if event["type"] == "result"]
    assert found["text/html"] == "<b>1</b>" and type(found["text"]) is str
    (found,) = [event["results"] for event in code(box, png).events if event["type"] == "result"]
    assert found["image/png"] == "iVBORw=="


def test_exceptions_have_their_class_and_a_traceback(box: ServedSandbox) -> None:
    found = code(box, "def f():\n    return nothing\nf()")
    assert found.error["ename"] == "NameError" and "nothing" in found.error["evalue"]
    assert any("in f" in line for line in found.error["traceback"])
    assert code(box, "import sys; sys.exit(3)").error["ename"] == "SystemExit"


@pytest.mark.parametrize(
    ("language", "show"), [("python", "import os; print(os.environ['HUE'])"), ("bash", 'echo "$HUE"')]
)
def test_a_new_context_has_the_variables_of_the_file(box: ServedSandbox, language: str, show: str) -> None:
    entry = """mkdir -p "$(dirname "$EXECD_ENVS")"; echo "HUE='a\\b'" >> "$EXECD_ENVS" """
    assert command(box.execd, entry).exit_code == 0
    context = box.execd.post("/code/context", json={"language": language}).json()
    assert code(box, show, **context).texts() == ["a\\b\n"]
    assert command(box.execd, 'rm "$EXECD_ENVS"').exit_code == 0


def test_bash_contexts_keep_their_state(box: ServedSandbox) -> None:
    assert code(box, "A=5", language="bash").types[-1] == "execution_complete"
    assert code(box, "echo $A", language="bash").texts() == ["5\n"]
    assert code(box, "(exit 3)", language="bash").error["evalue"] == "3"


@pytest.mark.parametrize("language", ["python", "bash"])
def test_an_interrupt_leaves_the_context_usable(box: ServedSandbox, language: str) -> None:
    begin, sleep, show = {
        "python": ("y = 7", "import time\nprint('begun')\ntime.sleep(60)", "print(y)"),
        "bash": ("y=7", "echo begun; sleep 60", "echo $y"),
    }[language]
    context = box.execd.post("/code/context", json={"language": language}).json()
    code(box, begin, **context)
    body = {"code": sleep, "context": context}
    with box.execd.stream("POST", "/code", json=body) as answer:
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        identifier = next(lines)["text"]
        while next(lines)["type"] != "stdout":
            pass
        assert box.execd.delete("/code", params={"id": identifier}).status_code == 200
        rest = [event["type"] for event in lines if event["type"] != "ping"]
    assert rest == ["execution_count", "error", "execution_complete"]
    assert code(box, show, **context).texts() == ["7\n"]


def test_the_default_context_of_a_language_is_one(box: ServedSandbox) -> None:
    found: list[EventsRead] = []
    threads = [threading.Thread(target=lambda: found.append(code(box, "1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.id for one in found}) == 1 == len({code(box, "1").id, found[0].id})


def test_contexts_are_listed_and_ended(box: ServedSandbox) -> None:
    execd: httpx.Client = box.execd
    one = execd.post("/code/context", json={"language": "bash"}).json()
    assert one in execd.get("/code/contexts", params={"language": "bash"}).json()
    assert one not in execd.get("/code/contexts", params={"language": "python"}).json()
    assert execd.get(f"/code/contexts/{one['id']}").json() == one
    assert execd.delete(f"/code/contexts/{one['id']}").status_code == 200
    for answer in (execd.get(f"/code/contexts/{one['id']}"), execd.delete(f"/code/contexts/{one['id']}")):
        assert answer.status_code == 404 and answer.json()["code"] == "CONTEXT_NOT_FOUND"
    assert execd.delete("/code", params={"id": "x"}).json()["code"] == "CONTEXT_NOT_FOUND"
    assert execd.delete("/code/contexts", params={"language": "bash"}).status_code == 200
    assert execd.get("/code/contexts", params={"language": "bash"}).json() == []
    answer = execd.post("/code", json={"code": "1", "context": {"id": one["id"]}})
    assert answer.status_code == 404
