"""One Python, many runs: variables, values, pictures, tracebacks, and what ends it."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade import AsyncSandbox, Policy, PolicyError, Sandbox, SetupError
from stockade.sessions import exchange
from stockade.sessions.interpreter import Interpreter, OpaqueValue
from support.means import need


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box


@pytest.fixture
def python(box: Sandbox) -> Iterator[Interpreter]:
    """Python alone: the environment of the tests may have IPython, which takes long to load."""
    with box.python(ipython=False) as python:
        yield python


class TestRuns:
    def test_variables_imports_and_definitions_stay(self, python: Interpreter) -> None:
        python.run("import math\nx = [1]\ndef f(n):\n    return n * x[0]\nclass C: pass")
        assert python.run("x.append(2); [f(3), math.pi, isinstance(C(), C), x, __name__]").value == [
            3, math.pi, True, [1, 2], "__main__",
        ]  # fmt: skip

    def test_streams_are_exact_and_apart(self, python: Interpreter) -> None:
        result = python.run(
            "import os, sys, subprocess\n"
            "print('é\\n'); sys.stderr.write('e'); os.write(1, bytes(range(256))); "
            "subprocess.run(['echo', 'child']); sys.stdout.write('no line end')"
        )
        assert result.stdout == "é\n\n".encode() + bytes(range(256)) + b"child\nno line end"
        assert result.stderr == b"e"

    def test_input_is_the_runs_own(self, python: Interpreter) -> None:
        assert python.run("input(), input()", input=b"one\ntwo\nthree\n").value == ("one", "two")
        assert python.run("import sys; sys.stdin.read()").value == ""
        data = bytes(range(256)) * 1000
        assert python.run("sys.stdin.buffer.read()", input=data).value == data

    @pytest.mark.parametrize(
        "code",
        [
            "sys.stdout.close()", "sys.stdout = None", "os.set_blocking(1, False)", "os.close(1)",
            "os.closerange(0, 3)", "sys.stdout = open('/dev/null', 'w')", "sys.stdout.detach()",
        ],
    )  # fmt: skip
    def test_what_is_done_to_the_streams_ends_with_the_run(self, python: Interpreter, code: str) -> None:
        python.run(f"import os, sys; {code}")
        result = python.run("print('x' * 300000)")
        assert (len(result.stdout), result.exit_code) == (300001, 0)

    @pytest.mark.parametrize(
        "code",
        ["None", "True", "2 ** 100", "-1.5", "'tä\\ud800'.encode('utf-8', 'replace').decode()", "b'\\0\\xff'",
         "[1, [2, (3, {'a': {4: None}})]]", "{}", "()", "{('a', 1): b'x'}", "float('inf')", "{'b': 'o'}"],
    )  # fmt: skip
    def test_plain_values_come_back_as_they_are(self, python: Interpreter, code: str) -> None:
        assert python.run(code).value == eval(code)

    def test_what_a_function_may_return_comes_back_as_it_is(self, python: Interpreter) -> None:
        code = (
            "import collections, datetime, decimal, fractions, pathlib, uuid\n"
            "[collections.Counter('aab'), datetime.datetime(2024, 2, 29, 1, tzinfo=datetime.timezone.utc),\n"
            " decimal.Decimal('1.50'), fractions.Fraction(1, 3), pathlib.Path('/a'), uuid.UUID(int=5),\n"
            " range(3), {1, 2}, frozenset({3}), 2j, collections.OrderedDict(b=1, a=2), 'a\\ud800']"
        )
        value = python.run(code).value
        names: dict[str, Any] = {}
        exec(code.replace("\n[", "\nwanted = [", 1), names)
        assert value == names["wanted"]
        assert list(map(type, value)) == list(map(type, names["wanted"]))

    def test_arrays_of_numpy_come_back_as_they_are(self) -> None:
        need(importlib.util.find_spec("numpy") is not None, "numpy is not installed")
        import numpy

        site = str(Path(numpy.__file__).parents[1])
        with Sandbox(Policy(read=[site], env={"PYTHONPATH": site})) as box, box.python() as python:
            value = python.run("import numpy; [numpy.arange(6.0).reshape(2, 3), numpy.float32(1.5)]").value
        assert numpy.array_equal(value[0], numpy.arange(6.0).reshape(2, 3))
        assert type(value[1]) is numpy.float32 and value[1] == 1.5

    def test_other_values_come_back_as_what_they_say(self, python: Interpreter) -> None:
        value = python.run("import types; [types.SimpleNamespace(a=1)]").value
        assert value == [OpaqueValue("types.SimpleNamespace", "namespace(a=1)")]
        assert python.run(
            "class Bad:\n    def __repr__(self): raise ValueError\nBad()"
        ).value.text.startswith("<Bad")
        assert isinstance(python.run("x = []; x.append(x); x").value, list)

    def test_only_the_last_line_has_a_value(self, python: Interpreter) -> None:
        assert python.run("1\n2").value == 2
        assert python.run("y = 3").value is None
        assert python.run("").value is None
        assert python.run("_ + 1").value == 3

    def test_callbacks_and_changes(self, tmp_path: Path) -> None:
        (tmp_path / "w").mkdir()
        out: list[bytes] = []
        with Sandbox(Policy(workspace=tmp_path / "w"), on_exit="discard") as box, box.python() as python:
            result = python.run("print(1); open('made', 'w').write('x')", on_stdout=out.append)
        assert b"".join(out) == result.stdout == b"1\n"
        assert [change.path for change in result.changes] == ["made"]


class TestErrors:
    def test_a_traceback_is_data_and_text(self, python: Interpreter) -> None:
        result = python.run("def f(n):\n    return 1 / n\n\nf(0)")
        assert (result.outcome, result.exit_code, result.value) == ("exited", 1, None)
        assert result.error is not None
        assert (result.error.type, result.error.message) == ("ZeroDivisionError", "division by zero")
        assert [(f.line, f.name, f.text) for f in result.error.frames] == [
            (4, "<module>", "f(0)"), (2, "f", "return 1 / n"),
        ]  # fmt: skip
        assert result.stderr.startswith(b"Traceback") and b"stockade" not in result.stderr
        assert python.run("1").error is None

    def test_a_syntax_error_runs_nothing(self, python: Interpreter) -> None:
        result = python.run("print(1)\nx = = 2")
        assert (result.stdout, result.exit_code) == (b"", 1)
        assert result.error is not None and (result.error.type, result.error.frames) == ("SyntaxError", ())

    @pytest.mark.parametrize(
        ("code", "status"),
        [("sys.exit()", 0), ("sys.exit(3)", 3), ("exit('no')", 1), ("raise SystemExit(256 + 7)", 7)],
    )
    def test_it_outlives_exit(self, python: Interpreter, code: str, status: int) -> None:
        python.run("import sys; x = 1")
        assert python.run(code).exit_code == status
        assert python.run("x").value == 1

    @pytest.mark.parametrize(
        ("code", "outcome", "status"),
        [("import os; os._exit(4)", "exited", 4), ("import os; os.kill(os.getpid(), 9)", "signalled", 137),
         ("import os; os.closerange(3, 1000)", "exited", 1),
         ("import os; os.execvp('false', ['false'])", "exited", 1)],
    )  # fmt: skip
    def test_what_ends_it_is_said_and_the_next_run_has_a_fresh_one(
        self, python: Interpreter, code: str, outcome: str, status: int
    ) -> None:
        python.run("x = 1")
        result = python.run(code, timeout=20)
        assert (result.outcome, result.exit_code) == (outcome, status)
        assert result.reason.startswith("the interpreter ended")
        assert python.run("'x' in globals()").value is False

    def test_a_forked_child_does_not_answer(self, python: Interpreter) -> None:
        result = python.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\npid > 0")
        assert result.value is True and python.run("1 + 1").value == 2

    def test_an_interpreter_that_is_not_there(self, box: Sandbox) -> None:
        with box.python(executable="python9") as python:
            result = python.run("1")
            assert (result.outcome, result.exit_code) == ("setup-failed", 127) and "python9" in result.reason

    def test_closed_it_runs_nothing(self, box: Sandbox) -> None:
        python = box.python()
        python.run("1")
        python.close()
        with pytest.raises(SetupError, match="interpreter was closed"):
            python.run("1")


class TestTime:
    @pytest.mark.parametrize(
        "code",
        [
            "while True: pass",
            "import time; time.sleep(60)",
            "import threading; threading.Event().wait()",
            "import subprocess; subprocess.run(['sleep', '60'])",
        ],
    )
    def test_a_timeout_interrupts_and_everything_stays(self, python: Interpreter, code: str) -> None:
        python.run("x = 1")
        result = python.run(f"print('up')\n{code}", timeout=0.4)
        assert (result.outcome, result.exit_code, result.text) == ("timed-out", 124, "up\n")
        assert result.error is not None and result.error.type == "KeyboardInterrupt"
        assert python.run("x").value == 1

    def test_one_that_does_not_heed_it_is_ended(
        self, python: Interpreter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange, "ANSWER", 0.2)
        code = "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass"
        python.run("1")  # IPython takes a while to start
        result = python.run(code, timeout=0.3, grace=0)
        assert result.outcome == "timed-out" and result.reason.startswith("the interpreter ended")
        assert python.run("1").value == 1

    def test_threads_take_turns(self, python: Interpreter) -> None:
        python.run("n = 0")
        threads = [
            threading.Thread(
                target=lambda: [
                    python.run("m = n; import time; time.sleep(0.001); n = m + 1") for _ in range(4)
                ]
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert python.run("n").value == 12


RICH = """
class Rich:
    def _repr_html_(self): return "<b>x</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_svg_(self): raise ValueError
    def _repr_mimebundle_(self, include=None, exclude=None): return {"text/x-own": "own"}
    def __repr__(self): return "Rich()"
"""


class TestDisplays:
    def test_a_value_comes_in_every_form_it_has(self, python: Interpreter) -> None:
        python.run(RICH)
        forms = {
            "text/plain": "Rich()", "text/html": "<b>x</b>", "image/png": b"\x89PNG", "text/x-own": "own",
        }  # fmt: skip
        assert python.run("Rich()").displays == (forms,)
        assert python.run("display(Rich(), 5); None").displays == (forms, {"text/plain": "5"})

    def test_what_is_larger_than_the_output_limit_is_left_out_and_counted(self) -> None:
        with Sandbox(Policy(limits={"output": "100K"})) as box, box.python() as python:
            result = python.run("display('a' * 50000); display('b' * 200000); 'c' * 200000")
            assert (result.ok, result.left_out) == (True, 3)
            assert [len(forms["text/plain"]) for forms in result.displays] == [50002]
            assert isinstance(result.value, OpaqueValue)

    def test_figures_come_back_as_pictures(self) -> None:
        found = importlib.util.find_spec("matplotlib")
        need(found is not None, "matplotlib is not installed")
        assert found is not None and found.origin is not None
        site = str(Path(found.origin).parents[1])
        policy = Policy(read=[site], env={"PYTHONPATH": site})
        with Sandbox(policy) as box, box.python(preload=("matplotlib.pyplot",)) as python:
            result = python.run(
                "import matplotlib.pyplot as plt\n"
                "plt.figure(figsize=(1, 1)); plt.axhspan(0, 1, color='#12ab34')\n"
                "plt.axis('off'); plt.show()\n"
                "fig, ax = plt.subplots(figsize=(1, 1)); ax.plot([1, 2], color='#ff0000', linewidth=30)\n"
                "fig",
                timeout=100,
            )
            assert result.error is None, result.error
            first, second = result.displays
            assert (0x12, 0xAB, 0x34) in _colours(first["image/png"])
            assert (0xFF, 0, 0) in _colours(second["image/png"]) and "Figure" in second["text/plain"]
            assert python.run("plt.get_fignums()").value == []

    def test_a_module_that_cannot_be_loaded_ahead_is_said(self, box: Sandbox) -> None:
        with box.python(preload=("json", "no_such_module")) as python:
            result = python.run("1")
            assert (result.outcome, result.exit_code) == ("setup-failed", 125)
            assert "no_such_module" in result.reason and result.hint
        with pytest.raises(PolicyError, match="preload"):
            box.python(preload="json")


class TestIPython:
    """Where it is installed inside, its shell runs the code; all else is as above."""

    @pytest.fixture
    def python(self) -> Iterator[Interpreter]:
        found = importlib.util.find_spec("IPython")
        need(found is not None, "IPython is not installed")
        assert found is not None and found.origin is not None
        site = str(Path(found.origin).parents[1])
        with (
            Sandbox(Policy(read=[site], env={"PYTHONPATH": site})) as box,
            box.python(ipython=True) as python,
        ):
            yield python

    def test_cells_have_magics_commands_and_await(self, python: Interpreter) -> None:
        result = python.run("import asyncio\n!echo out; echo err >&2\nawait asyncio.sleep(0, [1])")
        assert (result.value, result.stdout, result.stderr) == ([1], b"out\n", b"err\n")
        assert python.run("files = !echo a b\nlist(files)").value == ["a b"]
        assert python.run("_").value == ["a b"]
        assert "UsageError" in python.run("%there_is_no_such_magic").stderr.decode()

    def test_what_is_displayed_comes_in_every_form(self, python: Interpreter) -> None:
        result = python.run(
            "from IPython.display import HTML, JSON\ndisplay(HTML('<b>1</b>'), JSON({'a': 1}))\n2"
        )
        assert [forms.get("text/html") for forms in result.displays] == ["<b>1</b>", None, None]
        assert result.displays[1]["application/json"] == '{"a": 1}'
        assert result.displays[2] == {"text/plain": "2"} and result.stdout == b""

    def test_errors_exits_and_timeouts_are_told_as_ever(self, python: Interpreter) -> None:
        failed = python.run("kept = 1\ndef f():\n    raise KeyError('a')\nf()")
        assert failed.error is not None
        assert [(frame.line, frame.name) for frame in failed.error.frames] == [(4, "<module>"), (3, "f")]
        assert failed.stderr.startswith(b"Traceback") and failed.stdout == b""
        assert python.run("import sys; sys.exit(3)").exit_code == 3 and python.run("exit").exit_code == 0
        assert python.run("import time; time.sleep(60)", timeout=0.2).outcome == "timed-out"
        assert python.run("kept, input()", input=b"x\n").value == (1, "x")

    def test_one_that_is_wanted_and_missing_is_said_and_one_that_is_not_wanted_is_not_used(
        self, box: Sandbox
    ) -> None:
        with box.python(ipython=True) as python:
            result = python.run("1")
            if result.outcome != "exited":  # the system's own Python may have it
                assert result.outcome == "setup-failed" and "IPython" in result.reason
        with box.python(ipython=False) as python:
            assert not python.run("!true").ok


def _colours(png: Any) -> set[tuple[int, int, int]]:
    """Every colour of a picture without a palette, decoded by hand."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, width, depth = 8, b"", 0, 0
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IHDR":
            width, _, bits, colours = struct.unpack(">IIBB", png[at + 8 : at + 18])
            assert bits == 8
            depth = {2: 3, 6: 4}[colours]
        elif kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    raw, line, above, found = zlib.decompress(data), width * depth, bytes(width * depth), set()
    for start in range(0, len(raw), line + 1):
        row = bytearray(raw[start + 1 : start + 1 + line])
        for i in range(line):
            left, up = row[i - depth] if i >= depth else 0, above[i]
            corner = above[i - depth] if i >= depth else 0
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda near, guess=guess: abs(guess - near))
            row[i] = (row[i] + (0, left, up, (left + up) // 2, paeth)[raw[start]]) & 0xFF
        found |= {(row[i], row[i + 1], row[i + 2]) for i in range(0, line, depth)}
        above = bytes(row)
    return found


FIND = """
import gc, os, time
driver = next(found for found in gc.get_objects() if type(found).__name__ == "Driver")
"""


class TestLies:
    """The driver is made of the code it runs: whatever it says is only its word about itself."""

    @pytest.mark.parametrize(
        "content",
        ["{", "[]", "5", "null", '{"value": {"x": 1}}', '{"value": {"b": "!"}}', '{"displays": [5]}',
         '{"error": {}}', '{"value": ' + "[" * 3000 + "]" * 3000 + "}", '{"value": {"d": [[], 1]}}',
         '{"left_out": "many"}', '{"value": ' + "9" * 9999 + "}", '{"left_out": 1e999}',
         '{"value": [' + "[]," * 100_000 + "1]}",
         '{"value": {"d": [' + ",".join(f"{n * (2**61 - 1)}, 0" for n in range(2000)) + "]}}"],
    )  # fmt: skip
    def test_nonsense_is_counted_as_left_out(self, python: Interpreter, content: str) -> None:
        code = FIND + (
            f"content = {content!r}\n"
            "driver.send = lambda request, status, said: os.write(\n"
            "    driver.answers, f\"\\n{request['number']} 3 {len(content)}\\n{content}\".encode())\n"
        )
        result = python.run(code, timeout=20)
        assert (result.outcome, result.exit_code, result.value, result.left_out) == ("exited", 3, None, 1)

    def test_an_answer_beyond_the_limit_ends_it(self) -> None:
        with Sandbox(Policy(limits={"output": "1K"})) as box, box.python() as python:
            result = python.run(
                FIND + "def lie(request, status, said):\n"
                "    os.write(driver.answers, f\"\\n{request['number']} 0 {1 << 40}\\n\".encode())\n"
                "    time.sleep(60)\n"
                "driver.send = lie",
                timeout=30,
            )
            assert result.outcome == "cancelled" and python.run("1").value == 1


class TestAsync:
    def test_the_same_with_await(self) -> None:
        async def main() -> list[Any]:
            async with AsyncSandbox() as box, box.python() as one, box.python() as other:
                await one.run("x = 1")
                both = await asyncio.gather(one.run("x + 1"), other.run("'x' in globals()"))
                seen = asyncio.Event()
                running = asyncio.create_task(
                    one.run("print('up')\nwhile True: pass", on_stdout=lambda _: seen.set())
                )
                await seen.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                return [both[0].value, both[1].value, (await one.run("x")).value]

        assert asyncio.run(main()) == [2, False, 1]
