"""The published code-interpreter SDK, unmodified."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from code_interpreter import CodeInterpreterSync, SupportedLanguage
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd_sync import ExecutionHandlersSync


@pytest.fixture(scope="module")
def interpreter(connection: ConnectionConfigSync) -> Iterator[CodeInterpreterSync]:
    """As the SDK's first example makes it, image and entrypoint included."""
    box = SandboxSync.create(
        "opensandbox/code-interpreter:latest",
        entrypoint=["/opt/opensandbox/code-interpreter.sh"],
        env={"PYTHON_VERSION": "3.11"},
        connection_config=connection,
    )
    found = CodeInterpreterSync.create(sandbox=box)
    yield found
    found.close()
    box.destroy()


def test_the_interpreter_is_ready_at_once(interpreter: CodeInterpreterSync) -> None:
    assert interpreter.is_healthy() and interpreter.ping()


def test_the_last_expression_is_the_result(interpreter: CodeInterpreterSync) -> None:
    done = interpreter.codes.run("print('hi'); 2 + 2", language=SupportedLanguage.PYTHON)
    assert done.result[0].text == "4" and done.logs.stdout[0].text.rstrip("\n") == "hi"
    assert done.error is None and done.complete is not None and done.execution_count is not None


def test_variables_stay_in_their_context(interpreter: CodeInterpreterSync) -> None:
    first = interpreter.codes.create_context("python")
    second = interpreter.codes.create_context("python")
    interpreter.codes.run("x = 42", context=first)
    assert interpreter.codes.run("x", context=first).result[0].text == "42"
    missing = interpreter.codes.run("x", context=second)
    assert missing.error is not None and missing.error.name == "NameError" and missing.error.traceback


def test_code_without_a_context_shares_one_for_its_language(interpreter: CodeInterpreterSync) -> None:
    interpreter.codes.run("shared = 'yes'", language="python")
    assert interpreter.codes.run("print(shared)", language="python").text == "yes"


def test_bash_keeps_its_variables(interpreter: CodeInterpreterSync) -> None:
    context = interpreter.codes.create_context("bash")
    interpreter.codes.run("name=ada", context=context)
    assert interpreter.codes.run("echo $name", context=context).text == "ada"


def test_handlers_see_code_as_it_runs(interpreter: CodeInterpreterSync) -> None:
    seen: list[str] = []
    handlers = ExecutionHandlersSync(
        on_init=lambda _: seen.append("init"),
        on_stdout=lambda _: seen.append("stdout"),
        on_result=lambda _: seen.append("result"),
        on_error=lambda _: seen.append("error"),
        on_execution_complete=lambda _: seen.append("complete"),
    )
    interpreter.codes.run("print(1)\n5", language="python", handlers=handlers)
    assert seen == ["init", "stdout", "result", "complete"]


def test_an_interrupt_ends_the_code_and_not_the_context(interpreter: CodeInterpreterSync) -> None:
    context = interpreter.codes.create_context("python")
    interpreter.codes.run("kept = 7", context=context)
    started = threading.Event()
    ids: list[str] = []

    def begin(init) -> None:
        ids.append(init.id)
        started.set()

    def stop() -> None:
        assert started.wait(10)
        time.sleep(0.3)
        interpreter.codes.interrupt(ids[0])

    stopper = threading.Thread(target=stop)
    stopper.start()
    start = time.monotonic()
    handlers = ExecutionHandlersSync(on_init=begin)
    interpreter.codes.run("import time\nwhile True: time.sleep(0.1)", context=context, handlers=handlers)
    stopper.join()
    assert time.monotonic() - start < 15
    assert interpreter.codes.run("kept", context=context).result[0].text == "7"


def test_contexts_are_listed_found_and_deleted(interpreter: CodeInterpreterSync) -> None:
    context = interpreter.codes.create_context("bash")
    assert context.id in [one.id for one in interpreter.codes.list_contexts("bash")]
    assert context.id not in [one.id for one in interpreter.codes.list_contexts("python")]
    assert interpreter.codes.get_context(context.id).language == "bash"
    interpreter.codes.delete_context(context.id)
    with pytest.raises(SandboxApiException) as caught:
        interpreter.codes.get_context(context.id)
    assert caught.value.status_code == 404
    interpreter.codes.delete_contexts("bash")
    assert interpreter.codes.list_contexts("bash") == []


def test_a_language_that_is_not_there_says_so(interpreter: CodeInterpreterSync) -> None:
    with pytest.raises(SandboxException, match="java"):
        interpreter.codes.create_context("java")


def test_code_and_commands_share_files(interpreter: CodeInterpreterSync) -> None:
    interpreter.files.write_file("/tmp/data.csv", "1,2\n")
    assert interpreter.codes.run("print(open('/tmp/data.csv').read())", language="python").text == "1,2"
    interpreter.codes.run("open('/tmp/out', 'w').write('done')", language="python")
    assert interpreter.commands.run("cat /tmp/out").text == "done"
