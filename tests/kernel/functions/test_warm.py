"""Warm Python: code in fresh sandboxes that are copies of one interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, Result, Sandbox, SandboxExecutor, SetupError, sandboxed
from stockade.functions import WarmPython
from stockade.functions.reply import FunctionError
from stockade.functions.sandboxed_function import call, stream
from support import jobs
from support.warm import environment, template_pid


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with WarmPython(preload=["random", "numpy", "numpy.random"], size=0) as found:
        yield found


def evidence(result: Result) -> dict[str, Any]:
    assert result.receipt is not None
    found = result.receipt.statement.predicate.evidence
    assert found is not None
    return dict(found)


class TestLikeACommand:
    """What `python -c` does, it does."""

    def test_arguments_input_variables_and_directory(self, python: WarmPython) -> None:
        code = (
            "import os, sys\n"
            "print(sys.argv, sys.stdin.read(), os.environ['WHO'], os.getcwd(), __name__, sys.executable)\n"
            "os.system('echo $WHO')"
        )
        result = python.run(code, args=["a", "b c"], input=b"given", env={"WHO": "me"}, cwd="/usr/lib")
        words = ["['-c', 'a', 'b c']", "given", "me", "/usr/lib", "__main__", sys.executable]
        assert result.check().text == "me\n" + " ".join(words) + "\n"

    @pytest.mark.parametrize(
        ("code", "exit_code", "stderr"),
        [
            ("pass", 0, ""),
            ("import sys; sys.exit(3)", 3, ""),
            ("exit(4)", 4, ""),
            ("raise SystemExit('why')", 1, "why\n"),
            ("def f(): 1 / 0\nf()", 1, "ZeroDivisionError"),
            ("x = ", 1, "SyntaxError"),
            ("import os; os.kill(os.getpid(), 15)", 143, ""),
            ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130, "KeyboardInterrupt"),
            ("import sys; sys.stdout.close()", 0, ""),
        ],
    )
    def test_how_it_ends(self, python: WarmPython, code: str, exit_code: int, stderr: str) -> None:
        result = python.run(code)
        assert (result.exit_code, stderr in result.stderr.decode()) == (exit_code, True), result.stderr
        assert "stockade" not in result.stderr.decode()

    def test_what_is_to_be_done_at_the_end_is_done(self, python: WarmPython) -> None:
        code = (
            "import atexit, threading, time\n"
            "atexit.register(print, 'last')\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
            "print('first')"
        )
        assert python.run(code).check().text == "first\nthread\nlast\n"

    def test_modules_that_were_not_preloaded_are_found_and_those_of_the_workspace(
        self, tmp_path: Path
    ) -> None:
        place = tmp_path / "place"
        place.mkdir()
        (place / "mine.py").write_text("text = 'of the workspace'\n")
        with WarmPython(Policy(workspace=str(place)), size=0, on_exit="discard") as python:
            result = python.run("import decimal, msgspec, mine; print(mine.text); open('new', 'w').close()")
        assert result.check().text == "of the workspace\n"
        # A cold Python would have written the same, its cache too.
        assert {change.path for change in result.changes} >= {"new"}

    def test_processes_and_threads_of_its_own(self, python: WarmPython) -> None:
        code = (
            "import multiprocessing, subprocess, sys\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "def double(x): return 2 * x\n"
            "print(list(ThreadPoolExecutor(2).map(double, [1, 2])))\n"
            "print(subprocess.check_output([sys.executable, '-c', 'print(3)'], text=True))\n"
            "child = multiprocessing.get_context('fork').Process(target=print, args=('child',))\n"
            "child.start(); child.join()\n"
        )
        assert python.run(code).check().text.split() == ["[2,", "4]", "3", "child"]

    def test_time_and_output_are_limited(self, python: WarmPython) -> None:
        late = python.run("while True: pass", timeout=0.2, grace=0.1)
        assert late.outcome == "timed-out"
        assert python.run("print('x' * (11 << 20))").truncated

    def test_its_plan_is_that_of_the_command_and_its_receipt_as_full(self, python: WarmPython) -> None:
        warm = python.run("pass")
        cold = stockade.run([sys.executable, "-c", "pass"], python.policy)
        assert warm.plan == cold.plan
        assert warm.controls == cold.controls
        ours, theirs = evidence(warm), evidence(cold)
        assert set(ours.pop("namespaces")) == set(theirs.pop("namespaces"))
        # The table as such depends on which resident gate made it.
        assert ours.pop("mounts") and theirs.pop("mounts")
        assert ours == theirs


class TestCopies:
    def test_each_run_is_fresh(self, python: WarmPython) -> None:
        write = "import json; json.left = 1; open('/tmp/left', 'w').close(); print(__import__('os').getpid())"
        assert python.run(write).text == "2\n"
        look = "import json, os; print(hasattr(json, 'left'), os.path.exists('/tmp/left'), os.getpid())"
        assert python.run(look).text == "False False 2\n"

    def test_no_two_draw_the_same_numbers(self, python: WarmPython) -> None:
        code = (
            "import random, numpy, uuid, tempfile\n"
            "names = tempfile._get_candidate_names()\n"
            "print(random.random(), numpy.random.random(), uuid.uuid4(), next(names))"
        )
        drawn = [python.run(code).check().text.split() for _ in range(3)]
        for numbers in zip(*drawn, strict=True):
            assert len(set(numbers)) == 3, numbers

    def test_the_hash_seed_is_the_templates(self, python: WarmPython) -> None:
        code = "print(hash('word'))"
        assert python.run(code).text == python.run(code).text
        with WarmPython(size=0) as other:
            assert other.run(code).text != python.run(code).text

    def test_a_template_that_died_is_started_again(self, python: WarmPython) -> None:
        before = template_pid(python)
        os.kill(before, signal.SIGKILL)
        assert python.run("import numpy; print(1)").text == "1\n"
        assert template_pid(python) != before

    def test_none_is_started_again_once_it_is_closed(self) -> None:
        python = WarmPython(size=0)
        python.close()
        python.close()
        with pytest.raises(SetupError, match="closed"):
            python.run("pass")

    def test_what_a_module_prints_is_not_every_copys(self, tmp_path: Path) -> None:
        loud = environment(tmp_path / "e", loud="import os\nprint('loud', os.getcwd())")
        with WarmPython(preload=["loud"], python=loud, size=0) as python:
            assert python.run("print(1)").check().text == "1\n"

    def test_one_that_always_dies_is_a_setup_error(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match="the template did not start: it ended") as error:
            WarmPython(preload=["bad"], python=environment(tmp_path / "e", bad="import os; os._exit(3)"))
        assert error.value.stage == "template"

    def test_those_that_are_ready_are_used_once(self) -> None:
        with WarmPython(size=2) as python:
            limit = time.monotonic() + 10
            assert python._pool is not None
            while python._pool.ready < 2 and time.monotonic() < limit:
                time.sleep(0.01)
            code = "import os; print(os.path.exists('/tmp/x'), open('/tmp/x', 'w').name)"
            assert [python.run(code).check().text for _ in range(4)] == ["False /tmp/x\n"] * 4


class TestLivingSandboxes:
    def test_code_and_commands_share_one(self, python: WarmPython) -> None:
        with python.sandbox() as box:
            box.run(python.code("open('/tmp/x', 'w').write('1')")).check()
            assert box.run(["cat", "/tmp/x"]).text == "1"
            process = box.start(python.code("import sys; print(sys.stdout.isatty())"), pty=True)
            with process:
                assert process.stdout is not None
                assert process.stdout.read() == b"True\r\n"
                assert process.wait().ok

    def test_its_interpreter_is_a_copy_too(self, python: WarmPython) -> None:
        with python.sandbox() as box, box.python() as session:
            assert session.run("import sys; x = 'numpy' in sys.modules; print('out'); x").value is True
            again = session.run("x, open('/proc/self/comm').read()")
            assert again.value == (True, Path(sys.executable).name + "\n") and again.stdout == b""

    def test_no_other_sandbox_goes_on_in_the_template(self, python: WarmPython) -> None:
        with Sandbox() as box, pytest.raises(PolicyError, match="not opened by this WarmPython"):
            box.run(python.code("pass"))

    def test_nor_does_one_of_a_policy_that_hides_more(self, python: WarmPython, workspace: Path) -> None:
        """A module may have been loaded from what that hides or lets be changed."""
        (workspace / "new").mkdir()
        for policy in (Policy(workspace=str(workspace)), Policy(write=[str(workspace)])):
            with pytest.raises(PolicyError, match="not made for this policy"):
                stockade.run(python.code("pass"), policy)
        with WarmPython(Policy(workspace=str(workspace)), size=0) as other:
            for policy in (Policy(), Policy(write=[str(workspace / "new")]), Policy(env={"A": "1"})):
                assert stockade.run(other.code("print(1)"), policy).text == "1\n"

    def test_nor_does_one_that_says_what_may_be_executed(self, python: WarmPython) -> None:
        with pytest.raises(PolicyError, match="a copy of a template is not executed"):
            stockade.run(python.code("pass"), Policy(exec=["/usr/bin/true"]))

    def test_the_gate_itself_refuses_it(self, python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stockade.runs.command.resumes_template", lambda *_: True)
        with Sandbox() as box:
            result = box.run(["python3", "-c", "print(1)"])
        assert result.outcome == "setup-failed" and "template" in result.reason

    def test_a_copy_that_outlives_its_template(self, tmp_path: Path) -> None:
        with WarmPython(size=0) as python, python.sandbox() as box:
            python.close()
            assert box.run(python.code("print(1)")).text == "1\n"

    def test_without_namespaces(self) -> None:
        accept = [
            "files",
            "processes",
            "devices",
            "ipc",
            "network.none",
            "cleanup",
            "terminal",
            "environment",
        ]
        with WarmPython(Policy(backend="landlock", accept=accept), size=0) as python:
            assert python.run("import random; print(random.random() < 1)").check().text == "True\n"

    def test_with_the_hosts_network(self) -> None:
        with WarmPython(Policy(net="open"), size=0) as python:
            code = "import os; print(os.readlink('/proc/self/ns/net'))"
            assert python.run(code).text.strip() == os.readlink("/proc/self/ns/net")


class TestRefusals:
    """Whatever copies would share is refused, and so is code from where a sandbox may write."""

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
            ("1 / 0", "bad: ZeroDivisionError"),
            ("raise SystemExit", "bad: SystemExit"),
            (
                "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
                "thread",
            ),
            ("file = open('/etc/hostname')", "keeps a descriptor open: /etc/hostname"),
            ("import mmap\nshared = mmap.mmap(-1, 4096)", "memory that copies would share"),
            ("import subprocess\nchild = subprocess.Popen(['sleep', '0.1'])", "has started a process"),
        ],
        ids=["missing", "failing", "exiting", "thread", "descriptor", "shared memory", "process"],
    )
    def test_of_modules(self, tmp_path: Path, text: str, why: str) -> None:
        with pytest.raises(SetupError, match="the template did not start: preload: ") as error:
            WarmPython(preload=["bad"], python=environment(tmp_path / "e", bad=text))
        assert why in error.value.message

    @pytest.mark.parametrize("where", ["workspace", "write", "deny"])
    def test_of_places(self, tmp_path: Path, where: str) -> None:
        place = tmp_path / "place"
        place.mkdir()
        marker = tmp_path / "ran"
        (place / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
        interpreter = environment(tmp_path / "e", fine="")
        installed = next((tmp_path / "e/lib").glob("*/site-packages"))
        (installed / "evil.pth").write_text(f"{place}\nimport sys; sys.path.insert(0, {str(place)!r})\n")
        (installed / "linked.py").symlink_to(place / "evil.py")
        policy = Policy(**{where: str(place) if where == "workspace" else [str(place)]})
        for name, why in (("evil", "No module named 'evil'"), ("linked", f"lies in {place}")):
            with pytest.raises(SetupError) as error:
                WarmPython(policy, preload=[name], python=interpreter)
            assert why in error.value.message
        assert not marker.exists()
        with WarmPython(policy, preload=["fine"], python=interpreter, size=0) as python:
            assert python.run("print(1)").text == "1\n"
        # Elsewhere the same link is followed.
        with WarmPython(preload=["linked"], python=interpreter, size=0):
            assert marker.exists()

    def test_of_interpreters(self, tmp_path: Path) -> None:
        place = tmp_path / "place"
        interpreter = environment(place / "venv")
        with pytest.raises(PolicyError, match="lets programs work in it"):
            WarmPython(Policy(workspace=str(place)), python=interpreter)
        with pytest.raises(PolicyError, match="is not an executable file"):
            WarmPython(python=tmp_path / "none")
        text = tmp_path / "text"
        text.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
        text.chmod(stat.S_IRWXU)
        with pytest.raises(SetupError, match="but a script that starts it"):
            WarmPython(python=text)
        text.write_text("no program\n")
        with pytest.raises(SetupError, match="Exec format error"):
            WarmPython(python=text)

    @pytest.mark.parametrize(
        "options",
        [
            {"preload": "numpy"},
            {"preload": ["os; evil"]},
            {"size": -1},
            {"policy": Policy(exec=["/usr/bin/*"])},
            {"policy": Policy(reuse={"requests": 9})},
        ],
        ids=["one string", "no name", "size", "exec", "reuse"],
    )
    def test_of_options(self, options: dict[str, object]) -> None:
        with pytest.raises(PolicyError):
            WarmPython(**options)  # type: ignore[arg-type]

    def test_one_that_takes_too_long_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stockade.functions.interpreter_template.SECONDS", 0.3)
        slow = environment(tmp_path / "e", slow="import time\ntime.sleep(60)")
        with pytest.raises(SetupError, match="not ready after"):
            WarmPython(preload=["slow"], python=slow)

    def test_of_backends_that_copy_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stockade.backends.native.Native.copies", False)
        with pytest.raises(stockade.UnsupportedError, match="native backend cannot copy"):
            WarmPython()


class TestInAnEventLoop:
    def test_code_and_a_sandbox_to_live_in(self, python: WarmPython) -> None:
        async def main() -> list[str]:
            many = [python.aio("import sys; print(sys.argv[1:])", args=[str(n)]) for n in range(3)]
            async with python.async_sandbox() as box:
                await box.run(python.code("open('/tmp/x', 'w').write('kept')"))
                return [
                    found.text for found in (*await asyncio.gather(*many), await box.run(["cat", "/tmp/x"]))
                ]

        assert asyncio.run(main()) == ["['0']\n", "['1']\n", "['2']\n", "kept"]

    def test_a_cancelled_one_is_ended_first(self, python: WarmPython) -> None:
        async def main() -> None:
            await asyncio.wait_for(python.aio("import time; time.sleep(60)", grace=0), 0.3)

        with pytest.raises(TimeoutError):
            asyncio.run(main())


class TestFunctions:
    """A call in a copy is as one in an interpreter of its own."""

    def test_values_exceptions_and_streams(self, python: WarmPython) -> None:
        value, result = call(jobs.world, warm=python)
        assert value == (True, call(jobs.world).value[1], False) and result.receipt is not None
        with pytest.raises(KeyError) as caught:
            call(jobs.fail, ("KeyError", "x"), warm=python)
        assert "in fail" in caught.value.traceback  # type: ignore[attr-defined]
        assert list(stream(jobs.count, (3,), warm=python)) == [0, 1, 2]

    def test_an_executor_and_an_event_loop(self, python: WarmPython) -> None:
        with SandboxExecutor(max_workers=2, warm=python) as executor:
            assert list(executor.map(jobs.add, [1, 2])) == [2, 3]
        assert asyncio.run(sandboxed(warm=python)(jobs.later)(5)) == 5  # type: ignore[arg-type]

    def test_the_policy_is_the_templates_or_one_that_it_was_made_for(
        self, python: WarmPython, workspace: Path
    ) -> None:
        how = sandboxed(Policy(env={"A": "1"}), warm=python)(jobs.add)
        assert sandboxed(warm=python)(jobs.add).policy is python.policy and how(1) == 2
        for policy in (Policy(workspace=str(workspace)), Policy(exec=["/usr/bin/*"])):
            with pytest.raises(PolicyError):
                call(jobs.add, (1,), policy=policy, warm=python)
        with pytest.raises(PolicyError, match="already has an interpreter"):
            call(jobs.add, (1,), executable="/usr/bin/python3", warm=python)

    def test_a_template_that_knows_stockade_takes_no_call(self, tmp_path: Path) -> None:
        own = environment(tmp_path / "env", stockade="")
        python = WarmPython(preload=["stockade"], python=own, size=0)
        with python, pytest.raises(FunctionError, match="preloaded module has imported stockade"):
            call(jobs.add, (1,), warm=python)
        with pytest.raises(SetupError, match="WarmPython is closed"):
            call(jobs.add, (1,), warm=python)


def test_a_word_for_it_is_a_command_like_any_other(python: WarmPython) -> None:
    words = python.code("pass", ["x"])
    assert list(words) == [sys.executable, "-c", "pass", "x"]
