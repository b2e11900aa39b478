"""The environment and the working directory of a program: what was said, and nothing of the host's."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Result
from stockade.linux.user import Caller


def variables(result: Result) -> dict[str, str]:
    pairs = result.check().stdout.split(b"\0")[:-1]
    return dict(pair.decode("utf-8", "surrogateescape").split("=", 1) for pair in pairs)


def environment(policy: Policy | None = None, **options: object) -> dict[str, str]:
    return variables(stockade.run(["env", "-0"], policy, **options))  # type: ignore[arg-type]


def test_nothing_of_the_hosts_environment_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "LD_PRELOAD_X", "PYTHONPATH", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "of the host")
    for name in ("TERM", "TZ", "LANG", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)
    found = environment()
    assert set(found) == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG"}


def test_the_user_is_the_caller() -> None:
    caller = Caller.current()
    found = environment()
    assert (found["USER"], found["LOGNAME"]) == (caller.user, caller.user)
    assert found["SHELL"] == "/bin/sh"


def test_the_profile_passes_terminal_type_time_zone_and_language(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"TERM": "xterm-x", "TZ": "Asia/Tokyo", "LANG": "C", "LC_ALL": "C.UTF-8"}
    for name, value in passed.items():
        monkeypatch.setenv(name, value)
    found = environment()
    assert {name: found[name] for name in passed} == passed


def test_a_variable_is_passed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.delenv("ABSENT", raising=False)
    found = environment(Policy(pass_env=["WANTED", "ABSENT"]))
    assert found["WANTED"] == "yes" and "ABSENT" not in found


def test_the_policys_variable_lies_over_the_passed_one_and_the_runs_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORD", "host")
    policy = Policy(pass_env=["WORD"], env={"WORD": "policy", "OTHER": "policy"})
    assert environment(policy)["WORD"] == "policy"
    found = environment(policy, env={"WORD": "run"})
    assert (found["WORD"], found["OTHER"]) == ("run", "policy")


@pytest.mark.parametrize(
    "value",
    ["", " ", "a=b=c", "line\nline", "$(id)", "\t\x01\x7f", "ä€😀", "\udcff\udcfe", "x" * 100_000],
    ids=["empty", "blank", "equals", "newline", "shell", "control", "unicode", "not UTF-8", "long"],
)
def test_a_value_arrives_as_it_is(value: str) -> None:
    assert environment(env={"ODD": value})["ODD"] == value


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"], ids=["empty", "equals", "NUL"])
def test_a_name_that_no_environment_can_hold_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="env"):
        stockade.run(["true"], env={name: "x"})


def test_a_value_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(PolicyError, match="env"):
        stockade.run(["true"], env={"NAME": "a\0b"})


def test_the_command_is_looked_up_on_the_programs_own_path(workspace: Path) -> None:
    (workspace / "hello").write_text("#!/bin/sh\necho from the workspace\n")
    (workspace / "hello").chmod(0o755)
    policy = Policy(workspace=str(workspace))
    assert stockade.run(["hello"], policy).exit_code == 127
    assert stockade.run(["hello"], policy, env={"PATH": f"/none:{workspace}"}).text == "from the workspace\n"


def test_without_a_workspace_a_command_starts_in_the_private_home() -> None:
    result = stockade.run(["sh", "-c", 'pwd; echo "$HOME"; ls -A'])
    assert result.text.splitlines() == [Caller.current().home] * 2


def test_with_a_workspace_a_command_starts_in_it(workspace: Path) -> None:
    assert stockade.run(["pwd"], Policy(workspace=str(workspace))).text == f"{workspace}\n"


def test_another_working_directory_can_be_named(workspace: Path) -> None:
    (workspace / "sub").mkdir()
    policy = Policy(workspace=str(workspace))
    assert stockade.run(["pwd"], policy, cwd=str(workspace / "sub")).text == f"{workspace / 'sub'}\n"
    assert stockade.run(["pwd"], policy, cwd="/usr").text == "/usr\n"


def test_a_path_object_is_a_working_directory() -> None:
    assert stockade.run(["pwd"], cwd=Path("/usr")).text == "/usr\n"  # type: ignore[arg-type]


def test_the_working_directory_cannot_be_reached_through_another_processs_links() -> None:
    result = stockade.run(["pwd"], cwd="/proc/1/root")
    assert (result.outcome, result.exit_code) == ("setup-failed", 125)
