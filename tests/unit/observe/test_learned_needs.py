"""Programs, environment names and limits of a learned policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.controls import Control
from stockade.observe.learning.environment import learn_environment
from stockade.observe.learning.limits import learn_limits
from stockade.observe.learning.programs import MANY, learn_programs, missing_commands
from stockade.policy import Policy
from stockade.result import Usage

LIMITS = frozenset(Control(f"limits.{name}") for name in ("wall", "memory", "tasks", "cpu_time"))
COUNTED = {"cpu": "cgroup", "memory": "cgroup", "tasks": "cgroup"}


def program(path: Path, text: str = "\x7fELF") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_programs_of_the_system_are_listed(tmp_path: Path) -> None:
    paths = [program(tmp_path / "bin" / name) for name in ("git", "sh")]
    found = learn_programs(paths, [str(tmp_path)])
    assert [one.text for one in found.patterns] == sorted(paths) and not found.why_not


def test_the_interpreter_of_a_script_is_listed_too(tmp_path: Path) -> None:
    node = program(tmp_path / "bin" / "node")
    script = program(tmp_path / "bin" / "npm", f"#!{node} --flag\n")
    assert [one.text for one in learn_programs([script], [str(tmp_path)]).patterns] == [node, script]


def test_a_program_with_two_names_is_listed_by_the_one_that_was_executed(tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "gcc-12")
    (tmp_path / "bin" / "gcc").symlink_to("gcc-12")
    found = learn_programs([f"{tmp_path}/bin/gcc", real], [str(tmp_path)])
    assert [one.text for one in found.patterns] == [f"{tmp_path}/bin/gcc"]


def test_many_programs_of_one_directory_become_a_pattern(tmp_path: Path) -> None:
    paths = [program(tmp_path / "bin" / f"p{n}") for n in range(MANY)]
    assert [one.text for one in learn_programs(paths, [str(tmp_path)]).patterns] == [f"{tmp_path}/bin/*"]


@pytest.mark.parametrize("place", ["workspace/built", "venv/bin/python"])
def test_a_program_that_is_not_of_the_system_makes_a_list_impossible(tmp_path: Path, place: str) -> None:
    real = program(tmp_path / "usr" / "bin" / "python3")
    other = tmp_path / place
    other.parent.mkdir(parents=True)
    other.symlink_to(real)
    found = learn_programs([real, str(other)], [f"{tmp_path}/usr"])
    assert found.patterns == () and str(other) in found.why_not


@pytest.mark.parametrize(
    "printed",
    [
        b"sh: 1: mytool: not found\n",
        b"bash: line 1: mytool: command not found\n",
        b"env: 'mytool': No such file or directory\n",
        b"make: mytool: No such file or directory\n",
    ],
)
def test_a_command_that_is_missing_inside_is_found_in_the_users_path(tmp_path: Path, printed: bytes) -> None:
    program(tmp_path / "mine" / "mytool")
    assert missing_commands((), (), printed, f"{tmp_path}/mine", ["/usr"]) == {
        "mytool": f"{tmp_path}/mine/mytool"
    }


def test_a_command_that_was_tried_and_never_executed_is_missing(tmp_path: Path) -> None:
    program(tmp_path / "mine" / "tool")
    tried = ["/usr/local/bin/tool", "/usr/bin/tool"]
    assert missing_commands(tried, (), b"", f"{tmp_path}/mine", ["/usr"]) == {"tool": f"{tmp_path}/mine/tool"}
    assert missing_commands(tried, ["/usr/bin/tool"], b"", f"{tmp_path}/mine", ["/usr"]) == {}


@given(st.binary(max_size=300))
def test_whatever_a_program_prints_only_names_of_the_users_path_count(printed: bytes) -> None:
    assert missing_commands((), (), printed, "/nonexistent", ["/usr"]) == {}


def test_variables_that_the_programs_obey_are_passed_if_they_are_set() -> None:
    environ = {
        "PIP_INDEX_URL": "https://pypi.example/simple",
        "GIT_AUTHOR_NAME": "Ada",
        "CFLAGS": "-O2",
        "X": "1",
    }
    entries, questions = learn_environment(["/usr/bin/pip3", "/usr/bin/gcc"], environ)
    assert [(one.text, one.reason) for one in entries] == [("PIP_INDEX_URL", "pip3"), ("CFLAGS", "gcc")]
    assert questions == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIP_INDEX_URL", "https://ada:hunter2@pypi.example/simple"),
        ("NPM_CONFIG__AUTH", "YWRhOmh1bnRlcjI"),
        ("PIP_TOKEN", "x"),
        ("PIP_THING", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
        ("NPM_CONFIG_NODE_OPTIONS", "--proxy-password hunter2"),
        ("PIP_OPTIONS", "-Djavax.net.ssl.keyStorePassword=hunter2"),
    ],
)
def test_a_variable_that_looks_like_a_secret_is_a_question(name: str, value: str) -> None:
    entries, questions = learn_environment(["/usr/bin/pip", "/usr/bin/npm"], {name: value})
    assert entries == () and questions[0].allow == f'pass_env = ["{name}"]'
    assert value not in str(questions), "its value is repeated nowhere"


def test_variables_that_the_policy_has_already_are_left_out() -> None:
    assert learn_environment(["/usr/bin/make"], {"CC": "gcc"}, ["CC"]) == ((), ())


def test_limits_have_headroom_and_are_readable() -> None:
    usage = Usage(
        wall=12.0, cpu_user=20.0, cpu_system=5.0, peak_memory=300 << 20, peak_tasks=21, source=COUNTED
    )
    found = learn_limits(usage, LIMITS)
    assert {name: one.text for name, one in found.items()} == {
        "wall": '"1m"',
        "cpu_time": '"2m"',
        "memory": '"1G"',
        "tasks": "64",
    }


def test_only_limits_that_the_host_enforces_and_counts_are_learned() -> None:
    usage = Usage(wall=1.0, peak_memory=1 << 20, peak_tasks=3)
    assert {*learn_limits(usage, LIMITS)} == {"wall", "tasks"}, "rusage counts one process only"
    assert {*learn_limits(usage, {Control.LIMITS_WALL})} == {"wall"}


@given(
    wall=st.floats(0, 3e7),
    cpu=st.floats(0, 3e7),
    memory=st.integers(0, 1 << 50),
    tasks=st.integers(0, 1 << 21),
)
def test_every_limit_is_above_what_was_used_and_a_policy_takes_it(
    wall: float, cpu: float, memory: int, tasks: int
) -> None:
    usage = Usage(wall=wall, cpu_user=cpu, peak_memory=memory, peak_tasks=tasks, source=COUNTED)
    written = {name: one.text.strip('"') for name, one in learn_limits(usage, LIMITS).items()}
    limits = Policy(limits=written).limits
    assert limits.wall is not None and limits.wall >= wall
    assert limits.cpu_time is not None and limits.cpu_time >= cpu
    assert limits.memory is None or limits.memory >= memory
    assert limits.tasks is None or limits.tasks >= tasks


def test_no_limit_is_learned_from_nothing() -> None:
    assert learn_limits(Usage(), frozenset()) == {}
