"""Functions in sandboxes: what goes in, what comes back, how they end."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest

import stockade
from stockade import CommandError, DeniedError, LimitError, Policy, PolicyError, SetupError, sandboxed
from stockade.functions import packing, sandboxed_function
from stockade.functions.reply import FunctionError, WorkerDiedError
from stockade.functions.sandboxed_function import call
from support import jobs, points
from support.jobs import Greeter, OwnError
from support.means import applies, need
from support.paths import PACKAGE
from support.points import Point


class TestCalls:
    def test_the_value_comes_back_with_the_result_of_its_run(self) -> None:
        value, result = call(jobs.add, (1,), {"b": 2}, who={"agent": "ada"})
        assert (value, result.ok, result.stdout) == (3, True, b"adding\n")
        assert result.receipt is not None
        kept = result.receipt.predicate.protection
        assert kept is not None and (kept.sealed, kept.locked, kept.wiped) == ("observed", "absent", "absent")
        who = result.receipt.predicate.who
        assert (who.agent, who.action) == ("ada", "support.jobs.add")

    def test_plain_data_comes_back_as_it_is(self) -> None:
        value = [None, True, -(1 << 200), 1.5, 2j, "é\ud800", b"\0", bytearray(b"x"), (1, [2]), {(1, 2): {3}}]
        assert call(jobs.echo, (value,)).value == value

    def test_values_of_the_standard_library_come_back_as_they_are(self) -> None:
        value = [
            date(2024, 2, 29), time(1, 2, 3, 4, fold=1), timedelta(-1, 5), UTC,
            datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=2), "X")), Decimal("1.50"), Fraction(1, 3),
            UUID(int=7), Path("/a/b"), PurePosixPath("c"), range(1, 9, 2), Counter("aab"),
            OrderedDict(b=1, a=2), defaultdict(list, {1: [2]}), deque([1], 3), ip_address("::1"),
            ip_network("10.0.0.0/8"), {Decimal(1), frozenset({2})},
        ]  # fmt: skip
        found = call(jobs.echo, (value,)).value
        assert found == value and list(map(type, found)) == list(map(type, value))
        assert found[13].default_factory is list and found[4].tzname() == "X"

    def test_arrays_and_numbers_of_numpy_come_back_as_they_are(self) -> None:
        need(importlib.util.find_spec("numpy") is not None, "numpy is not installed")
        import numpy

        value = [
            numpy.arange(200_000.0).reshape(2, -1), numpy.asfortranarray(numpy.ones((2, 3), "i2")),
            numpy.array(["ä", "bcd"]), numpy.array(["2024-01-01", "NaT"], "M8[s]"), numpy.zeros((0, 3), bool),
        ]  # fmt: skip
        found = call(jobs.echo, ([*value, numpy.float32(1.5), {numpy.int64(1): numpy.str_("x")}],)).value
        for array, other in zip(value, found, strict=False):
            assert array.dtype == other.dtype and array.flags.f_contiguous == other.flags.f_contiguous
            assert numpy.array_equal(array, other, equal_nan=array.dtype.kind == "M")
            assert other.flags.writeable
        assert type(found[-2]) is numpy.float32 and type(found[-1][1]) is numpy.str_
        with pytest.raises(FunctionError, match="numpy ndarray of type object is not plain data"):
            call(jobs.echo, (numpy.array([None]),))

    def test_namedtuples_and_enums_of_its_module_come_back_as_they_are(self) -> None:
        assert call(points.named, (1,)).value == [points.Pair(1, points.Colour.RED), points.Way(3)]
        with pytest.raises(FunctionError, match="Pair is a namedtuple that was not declared"):
            call(jobs.echo, (points.Pair(1, 2),))
        assert call(jobs.echo, (points.Pair(1, 2),), types=[points.Pair]).value == points.Pair(1, 2)

    def test_a_dataclass_comes_back_if_it_is_declared(self) -> None:
        point = Point(1)
        assert call(points.moved, (point, 4)).value == [Point(5, point)]
        with pytest.raises(FunctionError, match="Point is a dataclass that was not declared") as caught:
            call(points.unsaid, (1,))
        assert caught.value.result is not None and caught.value.receipt is not None
        assert call(points.unsaid, (1,), types=(Point,)).value == Point(1)

    def test_decorated_functions_and_methods_and_what_pickle_finds_by_name(self) -> None:
        assert jobs.decorated(21) == 42
        greet = Greeter("hello").greet
        assert greet("ada") == greet.call("ada").value == "hello ada"
        # As Python calls it before 3.13, and since.
        assert Greeter.called("ada") == vars(Greeter)["called"].__func__(Greeter, "ada") == "Greeter ada"
        with pytest.raises(PolicyError, match="is already a classmethod"):
            sandboxed()(classmethod(jobs.add))  # type: ignore[arg-type]
        assert jobs.decorated.__name__ == "decorated" and "sandboxed" in repr(jobs.decorated)
        assert call(partial(jobs.add, 40), (2,)).value == 42
        assert call("a-b".split, ("-",)).value == ["a", "b"]

    def test_what_a_generic_dataclass_or_a_generator_is_said_to_be(self) -> None:
        assert points.boxed.__annotations__ and call(points.boxed, (1,)).value == points.Box(1)
        with pytest.raises(FunctionError, match=r"builtins\.generator is not plain data"):
            call(jobs.generated)

    def test_results_by_pickle_are_anything(self) -> None:
        value = call(jobs.echo, ({1: range(3), 2: Point},), trust_results=True).value
        assert value == {1: range(3), 2: Point}
        with pytest.raises(FunctionError, match=r"builtins\.slice is not plain data") as caught:
            call(jobs.echo, (slice(3),), types=())
        assert "trust_results=True" in caught.value.hint

    def test_hundreds_of_megabytes_come_back(self) -> None:
        """Far more than the pipes hold: nobody waits for the other with full hands."""
        value, result = call(jobs.sized, (200 << 20,))
        assert value == bytes(200 << 20) and result.ok
        big = bytes(range(256)) * (5 << 12)
        assert call(jobs.echo, (big,)).value == big

    def test_the_workspace_and_the_policy_are_those_of_a_run(self, workspace: Path) -> None:
        (workspace / "note").write_text("mine")
        value, result = call(jobs.missing, ("note",), policy=Policy(workspace=str(workspace)))
        assert value == "mine" and result.controls["workspace.overlay"]

    def test_without_namespaces_too(self) -> None:
        policy = Policy(backend="landlock", net="open", accept=list(stockade.policy.Control))
        assert call(jobs.add, (1,), policy=policy).value == 2


def reach(path: str) -> None:
    import socket

    try:
        socket.create_connection(("192.0.2.1", 443))
    except OSError:
        if path == "own":
            raise OwnError(1, "unreachable") from None
        raise


class TestExceptions:
    def test_an_exception_that_a_wall_may_explain_carries_the_hint_of_the_run(self) -> None:
        for path, kind in (("builtin", OSError), ("own", FunctionError)):
            with pytest.raises(kind) as caught:
                call(reach, (path,))
            assert any("tried to use the network" in note for note in caught.value.__notes__)

    def test_a_builtin_exception_is_raised_as_it_was_with_its_traceback(self) -> None:
        with pytest.raises(KeyError) as caught:
            call(jobs.fail, ("KeyError", "x", 3))
        error: Any = caught.value
        assert error.args == ("x", 3) and error.result.exit_code == 1
        for words in ("jobs.py", "in fail", "raise (kinds"):
            assert words in error.traceback
        assert "in fail" in str(error.__cause__) and "<stockade>" not in error.traceback

    def test_an_operating_system_error_names_its_file(self) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            call(jobs.missing, ("/home/secret",))
        assert (caught.value.errno, caught.value.filename) == (2, "/home/secret")

    def test_others_are_told_in_words_unless_they_are_declared(self) -> None:
        with pytest.raises(FunctionError, match=r"^OwnError: a\\x1b\[2J\\nb$") as caught:
            call(jobs.fail, ("own", "a\x1b[2J\nb"))
        assert isinstance(caught.value, CommandError) and caught.value.type == "OwnError"
        assert "\x1b" not in caught.value.traceback
        with pytest.raises(OwnError, match=r"^mine$"):
            call(jobs.fail, ("own", "mine"), types=(OwnError,))

    def test_what_would_mean_something_to_the_caller_is_only_told(self) -> None:
        for kind in ("exit", "stop"):
            with pytest.raises(FunctionError):
                call(jobs.fail, (kind, 0))


class TestEnds:
    def test_a_dead_interpreter_is_an_error_with_its_last_words(self) -> None:
        with pytest.raises(WorkerDiedError, match="exited with 9; last line of stderr: 'last") as caught:
            call(jobs.die)
        assert caught.value.result is not None
        with pytest.raises(WorkerDiedError):
            call(jobs.die, (0,))

    def test_a_time_that_is_over_is_a_timeout(self) -> None:
        with pytest.raises(stockade.TimeoutError) as caught:
            call(jobs.spin, timeout=0.3, grace=0)
        assert caught.value.result is not None and caught.value.result.outcome == "timed-out"

    def test_a_wall_that_ends_it_is_a_denial(self) -> None:
        with pytest.raises(DeniedError) as caught:
            call(jobs.signalled, (signal.SIGSYS,))
        assert caught.value.result is not None and caught.value.result.outcome == "denied"

    def test_memory_that_runs_out_is_a_limit(self) -> None:
        applies(stockade.Host.current().has("cgroup.memory"), "there is no memory cgroup")
        with pytest.raises(LimitError, match="memory ran out") as full:
            call(jobs.eat, (200,), policy=Policy(limits={"memory": "64M"}))
        assert full.value.result is not None and full.value.receipt is not None

    def test_a_result_that_is_too_large_is_refused_on_both_sides(self) -> None:
        with pytest.raises(LimitError, match='max_result = "1M"'):
            call(jobs.sized, (2 << 20,), max_result="1M")
        with pytest.raises(LimitError, match='max_result = "1M"'):
            call(jobs.echo, ([[]] * 100000,), max_result="1M")

    def test_a_forked_child_does_not_answer(self) -> None:
        assert call(jobs.forked).value == 1


class TestStreams:
    def test_what_is_yielded_comes_as_it_is_asked_for(self) -> None:
        stream = sandboxed()(jobs.count)(3)
        assert list(stream) == [0, 1, 2] and (stream.value, stream.result.ok) == (3, True)
        with sandboxed_function.stream(jobs.count, (1 << 60,)) as endless:
            assert [next(endless) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert endless.result is None and list(endless) == []
        assert call(jobs.count, (4,)).value == [0, 1, 2, 3]

    def test_a_forked_child_and_the_end_of_the_interpreter_do_no_harm(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(FORKING)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("the process that began it\n0 1\n", "")

    def test_coroutines_and_asynchronous_generators(self) -> None:
        async def main() -> list[Any]:
            both = await asyncio.gather(sandboxed()(jobs.later)("a"), sandboxed()(jobs.add).aio(2, b=3))
            endless = sandboxed()(jobs.counted)(1 << 60)
            first = [await anext(endless) for _ in range(3)]
            await endless.aclose()
            return [*both, first, [n async for n in sandboxed()(jobs.counted)(3)]]

        assert asyncio.run(main()) == ["a", 5, [0, 1, 2], [0, 1, 2]]
        assert sandboxed()(jobs.later).call("b").value == "b"

    def test_a_cancelled_call_is_ended_first(self, stockade_home: Path) -> None:
        async def main() -> None:
            task = asyncio.create_task(sandboxed(grace=0)(jobs.spin).aio(60))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())


FACTOR = 3


def closure(number: int) -> Any:
    def inner(more: int = 1, *, most: int = 100) -> int:
        return min(most, number * FACTOR + more)

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    return inner, factorial


def unwrapped(function: Any) -> Any:
    """A decorator that does not say what it has decorated."""

    def wrapper(*args: Any) -> Any:
        return function(*args) + 1

    return wrapper


@unwrapped
def decorated(x: int) -> int:
    return x * 10


class TestWhatIsHandedIn:
    def test_lambdas_and_functions_inside_functions_take_along_what_they_use(self) -> None:
        inner, factorial = closure(2)
        assert (call(inner).value, call(inner, (2,), {"most": 7}).value) == (7, 7)
        assert call(factorial, (5,)).value == 120
        assert call(lambda x: x + FACTOR, (1,)).value == 4
        assert call(decorated, (1,)).value == 11
        assert [*sandboxed(lambda n: (yield from range(n)))(3)] == [0, 1, 2]

    def test_their_tracebacks_show_their_lines(self) -> None:
        nothing = 0
        with pytest.raises(ZeroDivisionError) as caught:
            call(lambda: 1 / nothing)
        assert "call(lambda: 1 / nothing)" in caught.value.traceback  # type: ignore[attr-defined]

    def test_what_they_use_and_cannot_be_sent_is_named_with_the_reason(self) -> None:
        lock = threading.Lock()

        class Local:
            pass

        for function, why in (
            (lambda: lock, r"<lambda> uses lock of the enclosing function, .*cannot pickle '_thread\.lock'"),
            (lambda key=lock: key, "<lambda> uses key as a default argument, which cannot be sent"),
            (lambda: [Local()], "<lambda> uses Local of the enclosing function, which cannot be sent"),
        ):
            with pytest.raises(SetupError, match=why) as caught:
                call(function)
            assert "pass plain data" in caught.value.hint

    def test_another_version_of_python_says_that_it_cannot_load_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packing, "MAGIC_NUMBER", b"none")
        with pytest.raises(SetupError, match="only the caller's version of Python can load it"):
            call(lambda: 1)

    def test_cells_of_a_notebook_are_sent_as_they_are(self, tmp_path: Path) -> None:
        need(importlib.util.find_spec("IPython") is not None, "IPython is not installed")
        script = tmp_path / "notebook.py"
        script.write_text(NOTEBOOK)
        env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=env)
        assert done.stdout == "Score(name='a', points=6)\nPair(a=1, b=3) 4\n7\n", done.stderr

    def test_arguments_that_cannot_be_handed_in_are_refused(self) -> None:
        with pytest.raises(SetupError, match="the arguments cannot be pickled"):
            call(jobs.echo, ((x for x in ()),))
        with pytest.raises(SetupError, match="a Policy of Stockade cannot be passed"):
            call(jobs.echo, (Policy(),))

    def test_options_that_are_none_are_refused(self) -> None:
        for wrong in ({"trust_results": "yes"}, {"on_exit": "commit"}, {"max_result": "much"}):
            with pytest.raises(PolicyError):
                sandboxed(**wrong)  # type: ignore[arg-type]
        with pytest.raises(PolicyError, match="not a Policy"):
            sandboxed(3)  # type: ignore[call-overload]

    def test_the_decorator_needs_no_parentheses(self) -> None:
        assert sandboxed(jobs.add)(1) == 2
        assert asyncio.run(sandboxed(jobs.later)("a")) == "a"
        assert list(sandboxed(jobs.count)(2)) == [0, 1]
        with pytest.raises(PolicyError, match="is already a staticmethod"):
            sandboxed(staticmethod(jobs.add))

    def test_a_script_needs_no_module(self, tmp_path: Path) -> None:
        """Only the definitions that are used go in: neither the rest of the file nor other variables."""
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert done.stdout == WANTED, done.stderr

    def test_a_function_without_source_is_sent_as_code_and_a_class_says_that_it_has_none(self) -> None:
        code = "import stockade\nN = 4\nexec('@stockade.sandboxed\\ndef f(): return N')\nprint(f())\n"
        code += "exec('class C: pass\\ndef g(): return C')\nstockade.sandboxed(g)()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout == "4\n" and "SetupError: the source of C cannot be found" in done.stderr

    def test_an_interpreter_that_is_not_there(self) -> None:
        with pytest.raises(SetupError, match="python9"):
            call(jobs.add, (1,), executable="python9")


NOTEBOOK = """\
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
for cell in (
    "from collections import namedtuple\\nfrom dataclasses import dataclass\\nfrom stockade import sandboxed",
    "FACTOR = 3\\nPair = namedtuple('Pair', 'a b')",
    "@dataclass\\nclass Score:\\n    name: str\\n    points: int = 0",
    "def helper(x):\\n    return x * FACTOR",
    "@sandboxed\\ndef work(x) -> Score:\\n    return Score('a', helper(x))\\nprint(work(2))",
    "@sandboxed\\ndef pair(x):\\n    return Pair(x, helper(x))",
    "print(pair(1), sandboxed(lambda x: x + FACTOR)(1))",
    "@sandboxed\\nasync def later(x):\\n    return x\\nprint(await later(7))",
):
    assert shell.run_cell(cell).success
"""
FORKING = """\
import os, stockade, sys
@stockade.sandboxed()
def numbers(n):
    yield from range(n)
stream = numbers(10**9)
first = next(stream)
child = os.fork()
if not child:
    try:
        next(stream)
    except stockade.SetupError as error:
        print(str(error)[-25:], flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print(first, next(stream))
"""
SCRIPT = """\
import threading
from dataclasses import dataclass
from stockade import CommandError, Policy, sandboxed
PASSWORD = password = token = "swordfish"
FACTOR = 3
lock = threading.Lock()
policy = Policy()
@dataclass
class Pair:
    left: int
    right: "list[Pair]"
START = Pair(1, [])
def helper(n: int) -> int:
    return n * FACTOR
@sandboxed(policy)
def work(n, password=0) -> Pair:
    import sys
    token = password
    main = sys.modules["__main__"]
    assert not {"PASSWORD", "password", "token"} & set(vars(main)) and __name__ == "__main__"
    return Pair(helper(n) + token, [START])
@sandboxed(policy)
def locked():
    return lock
print(work(2))
try:
    locked()
except NameError as error:
    print(error, "|", error.traceback.splitlines()[-1])
print("once")
"""
WANTED = """\
Pair(left=6, right=[Pair(left=1, right=[])])
name 'lock' is not defined | (lock could not be sent into the sandbox: cannot pickle '_thread.lock' object)
once
"""


def test_what_runs_inside_is_written_for_older_pythons() -> None:
    """For 3.8; what it calls is not checked here."""
    for name in (
        "inside/function_worker.py",
        "inside/channel_crypto.py",
        "inside/encoder.py",
        "__init__.py",
        "errors.py",
    ):
        ast.parse((PACKAGE / name).read_text(), feature_version=(3, 8))


def test_a_function_can_be_pickled_by_its_name_although_it_is_decorated() -> None:
    assert pickle.loads(pickle.dumps(jobs.echo)) is jobs.echo
    found: Any = call(jobs.echo, (jobs.decorated,), trust_results=True).value
    assert found.__wrapped__ is jobs.decorated.__wrapped__
