"""Learning in rounds, with a program that is a function: it ends at the first thing that the policy lacks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stockade.controls import Control
from stockade.errors import SetupError
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.learning.rounds import MOST_RUNS, LearningPlace, LearningRun, learn
from stockade.observe.learning.secret_paths import SecretPlaces
from stockade.policy import Policy
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import parse_rule
from stockade.result import Decision, Outcome, Result, Usage

OK = Result(outcome=Outcome.EXITED, exit_code=0, usage=Usage(wall=1.0, peak_tasks=2))
FAILED = Result(outcome=Outcome.EXITED, exit_code=1, reason="exit code 1")


def refused(path: str) -> Answer:
    access = Access(action=Action.READ, target=path, program="/usr/bin/tool", error=errno.ENOENT)
    return Answer(access=access, allowed=False, wall="files", clause="read", reason="hidden")


class Program:
    """A program that needs some things, one after the other, and what it was given in each run."""

    def __init__(self, *files: str, hosts: tuple[str, ...] = (), executes: tuple[str, ...] = ()) -> None:
        self.files, self.hosts, self.executes = files, hosts, executes
        self.given: list[Policy] = []

    def __call__(self, policy: Policy) -> LearningRun:
        self.given.append(policy)
        if policy.exec is not None and not {*self.executes} <= {*policy.exec}:
            return LearningRun(FAILED)
        for path in self.files:
            if not any(path == one or path.startswith(f"{one}/") for one in policy.read):
                return LearningRun(FAILED, (refused(path),), executed=self.executes)
        assert not isinstance(policy.net, str)
        rules = RuleSet([parse_rule(rule) for rule in policy.net])
        decisions = []
        for host in self.hosts:
            name, _, port = host.partition(":")
            allowed = rules.for_name(name, int(port)).allowed
            decisions.append(
                Decision(
                    kind="connect" if allowed else "name",
                    time=0.0,
                    name=name,
                    port=int(port) if allowed else 0,
                    verdict="allowed" if allowed else "denied",
                    reason="" if allowed else "no rule",
                )
            )
        ended = OK if all(one.verdict == "allowed" for one in decisions) else FAILED
        return LearningRun(msgspec.structs.replace(ended, network=decisions), executed=self.executes)


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    top = tmp_path_factory.mktemp("host")
    (top / "home").mkdir()

    def make(name: str) -> str:
        path = top / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        return str(path)

    return make


def place(files: Callable[[str], str], **more: object) -> LearningPlace:
    home = os.path.dirname(files("home/x"))
    enforceable = frozenset({Control.LIMITS_WALL, Control.LIMITS_MEMORY})
    settings: dict[str, object] = {"environ": {}, "enforceable": enforceable, **more}
    return LearningPlace(places=SecretPlaces(home), **settings)  # type: ignore[arg-type]


def test_one_thing_after_the_other_is_learned_and_the_last_run_is_under_the_policy(
    files: Callable[[str], str],
) -> None:
    program = Program(files("a/one"), files("b/two"), hosts=("api.example.com:443",))
    learned = learn(Policy(), place(files), program)
    assert learned.settled and learned.exit_code == 0
    policy = learned.policy()
    assert {*policy.read} == {*program.files} and policy.net == ("api.example.com:443",)
    last = program.given[-1]
    assert (last.read, last.limits, last.exec) == (policy.read, policy.limits, policy.exec)


def test_a_program_that_needs_nothing_runs_twice(files: Callable[[str], str]) -> None:
    program = Program()
    assert learn(Policy(), place(files), program).runs == len(program.given) == 2


def test_no_run_is_given_a_secret_and_learning_ends(files: Callable[[str], str]) -> None:
    program = Program(files("a/one"), files("home/.netrc"), files("b/never"))
    learned = learn(Policy(), place(files), program)
    assert learned.settled and learned.exit_code == 1
    assert all(".netrc" not in path for policy in program.given for path in policy.read)
    assert [one.wanted for one in learned.questions] == [f"read {program.files[1]}"]


def test_without_the_network_hosts_are_questions(files: Callable[[str], str]) -> None:
    program = Program(hosts=("api.example.com:443",))
    learned = learn(Policy(), place(files, reach=False), program)
    assert learned.policy().net == () and "api.example.com" in learned.questions[0].allow
    assert all(not rule for policy in program.given for rule in policy.net if not rule.startswith("!"))


def test_programs_are_not_listed_if_the_command_then_fails(files: Callable[[str], str]) -> None:
    tool = files("usr/tool")
    program = Program(executes=(tool,))
    found = learn(Policy(), place(files, system=(os.path.dirname(tool),)), program)
    assert [one.text for one in found.exec] == [tool] and found.runs == 2

    class Fragile(Program):
        def __call__(self, policy: Policy) -> LearningRun:
            return LearningRun(FAILED) if policy.exec is not None else super().__call__(policy)

    found = learn(Policy(), place(files, system=(os.path.dirname(tool),)), Fragile(executes=(tool,)))
    assert found.exec == () and found.settled and found.runs == 3
    assert any("in another way" in note for note in found.notes)


def test_a_policy_to_merge_with_is_never_narrowed(files: Callable[[str], str]) -> None:
    tool = files("usr/tool")
    start = Policy(limits={"wall": "1h"})
    found = learn(
        start, place(files, narrow=False, system=(os.path.dirname(tool),)), Program(executes=(tool,))
    )
    assert found.policy() == start


def test_a_program_that_always_wants_more_ends_after_some_runs(files: Callable[[str], str]) -> None:
    count = 0

    def endless(policy: Policy) -> LearningRun:
        nonlocal count
        count += 1
        return LearningRun(FAILED, (refused(files(f"d{count}/file")),))

    learned = learn(Policy(), place(files), endless)
    assert not learned.settled and learned.runs == count == MOST_RUNS


def test_a_program_of_the_user_that_only_the_user_may_read_is_a_question(
    files: Callable[[str], str],
) -> None:
    tool = files("mine/deploy")
    os.chmod(tool, 0o700)
    lie = msgspec.structs.replace(FAILED, stderr=b"sh: 1: deploy: not found\n")
    environ = {"PATH": os.path.dirname(tool)}
    learned = learn(Policy(), place(files, environ=environ), lambda policy: LearningRun(lie))
    assert learned.toolchain == () and learned.questions[0].allow == 'toolchain = ["deploy"]'


def test_a_sandbox_that_does_not_start_is_an_error(files: Callable[[str], str]) -> None:
    broken = Result(outcome=Outcome.SETUP_FAILED, exit_code=125, reason="no namespaces")
    with pytest.raises(SetupError, match="no namespaces"):
        learn(Policy(), place(files), lambda policy: LearningRun(broken))


def test_the_place_of_a_link_does_not_matter(files: Callable[[str], str]) -> None:
    target = files("real/file")
    link = Path(files("names/x")).with_name("link")
    link.symlink_to(target)
    learned = learn(Policy(), place(files), Program(str(link)))
    assert [one.text for one in learned.read] == [target]
