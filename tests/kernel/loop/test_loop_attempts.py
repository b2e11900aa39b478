"""Attempts and their judge: what passes, what fails, and what never counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stockade
from stockade.loop import events
from stockade.loop.items.item import WorkItem
from stockade.loop.work import item_work
from stockade.receipt import chain
from support.loops import VERIFY, make_loop, make_project, right, run_loop


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


def files(project: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(project)): path.read_bytes() for path in project.rglob("*") if path.is_file()
    }


def test_a_passed_attempt_lands_with_receipts_and_leaves_nothing_aside(project: Path) -> None:
    done = run_loop(project, f"cat > prompt.txt; cat untracked.txt; {right('a')}")
    assert done.end is not None and (done.end.outcome, done.end.exit_code) == ("done", 0)
    assert "a=1\n" in (project / "values.sh").read_text()
    assert "Set a" in (project / "prompt.txt").read_text() and VERIFY in (project / "prompt.txt").read_text()
    assert [event.text for event in done.all(events.AgentLine)] == ["no git here"]
    landing = done.all(events.Landing)[0]
    assert set(landing.paths) == {"prompt.txt", "values.sh"} and landing.diff.files == 2
    assert len(landing.receipts) == 2, "the agent's and the judge's"
    who = chain.of(os.environ["STOCKADE_HOME"]).find(landing.receipts[0]).predicate.who
    assert (who.category, who.words) == ("loop", "item a, attempt 1")
    assert stockade.Workspace.list() == []


def test_an_attempt_that_changes_nothing_fails_whatever_it_says(project: Path) -> None:
    before = files(project)
    done = run_loop(project, "echo ALL DONE; mkdir __pycache__; echo x > __pycache__/x.pyc", attempts=2)
    assert done.outcomes("a") == ["no-change", "no-change"] and done.phases == {"a": "failed"}
    assert done.end is not None and done.end.exit_code == 1 and files(project) == before


@pytest.mark.parametrize(
    "cheat",
    [
        "echo > tests/wanted; touch x",
        "rm -r tests; mkdir tests; echo 'echo 1..2; echo ok - a; echo ok - b' > tests/check.sh",
        "mv tests t; ln -s t tests; echo > t/wanted",
        "rm -r tests; echo 'exit 0' > tests; touch x",
    ],
    ids=["edited", "replaced", "linked", "retyped"],
)
def test_tests_that_the_attempt_changed_are_restored_before_they_judge(project: Path, cheat: str) -> None:
    before = files(project)
    done = run_loop(project, cheat, attempts=1)
    assert done.outcomes("a") == ["rejected"] and files(project) == before
    assert any(path.startswith("tests") for path in done.all(events.JudgeStart)[0].restored)


def test_tests_behind_a_link_are_the_judges_too(project: Path) -> None:
    (project / "tests").rename(project / "checks")
    (project / "tests").symlink_to("checks")
    cheat = "echo 'echo 1..2; echo ok - a; echo ok - b' > checks/check.sh"
    done = run_loop(project, cheat, attempts=1)
    assert done.phases == {"a": "failed"} and "checks/check.sh" in done.reasons("a")[0]


def test_code_under_test_that_exits_early_does_not_pass(project: Path) -> None:
    done = run_loop(project, "echo 'exit 0' > values.sh", attempts=1)
    assert done.outcomes("a") == ["rejected"] and "exited with 0, but its report" in done.reasons("a")[0]
    done = run_loop(project, "echo 'echo 1..1; echo ok - a; exit 0' > values.sh", attempts=1)
    assert "did not run: b" in done.reasons("a")[0], "every test of the baseline must be in the report"


def test_what_failed_before_does_not_count_and_what_passed_does(project: Path) -> None:
    done = run_loop(project, "echo feature > feature.txt", attempts=1)
    assert done.phases == {"a": "landed"} and "these did: a" in done.reasons("a")[0]
    assert run_loop(project, "touch other", attempts=1, strict=True).outcomes("a") == ["rejected"]
    broken = run_loop(project, f"{right('a')}; sed -i s/b=1/b=2/ values.sh", attempts=1)
    assert broken.outcomes("a") == ["rejected"] and "passed before did not pass: b" in broken.reasons("a")[0]


def test_an_item_with_a_verify_command_of_its_own_needs_its_success(project: Path) -> None:
    own = WorkItem(id="own", title="Own", verify="grep -q a=1 values.sh && echo 1..0")
    done = run_loop(project, 'case "$(cat)" in *failed*) ' + right("a") + ";; *) touch x;; esac", [own])
    assert done.outcomes("own") == ["rejected", "passed"] and not (project / "x").exists()


def test_the_next_attempt_is_told_what_the_judge_printed(project: Path) -> None:
    wrong = "sed -i s/b=1/b=3/ values.sh"
    agent = f'case "$(cat)" in *"not ok - b"*) {right("a")};; *) {wrong};; esac'
    done = run_loop(project, agent)
    assert done.outcomes("a") == ["rejected", "passed"] and "b=1" in (project / "values.sh").read_text()


def test_the_exit_code_of_the_agent_does_not_judge_its_work(project: Path) -> None:
    done = run_loop(project, "exit 3", attempts=1)
    assert done.outcomes("a") == ["crashed"] and "3" in done.reasons("a")[0]
    assert run_loop(project, f"{right('a')}; exit 3").phases == {"a": "landed"}


def test_attempts_that_hang_end_with_everything_they_started(project: Path) -> None:
    hang = "(trap '' TERM; sleep 1000) & setsid sleep 1000 & touch x; sleep 1000"
    done = run_loop(project, hang, attempts=1, budget={"attempt": {"time": 0.5}})
    assert done.outcomes("a") == ["out-of-time"] and not (project / "x").exists()
    done = run_loop(project, "echo a; sleep 1000", attempts=1, budget={"attempt": {"idle": 0.5}})
    assert done.outcomes("a") == ["idle"]


CLAUDE = """#!/bin/sh
case "$1" in --version) echo 9.9; exit;; esac
cat > /dev/null
n=$(($(cat "$COUNT")+1)); echo $n > "$COUNT"
if [ $n -le "$LIMITED" ]; then
  echo '{"type":"result","subtype":"error","is_error":true,"api_error_status":529,"total_cost_usd":0}'
  exit 1
fi
sed -i s/^a=0/a=1/ values.sh
echo '{"type":"result","subtype":"success","total_cost_usd":1.5,"usage":{"input_tokens":7,"output_tokens":3}}'
sleep "${LAST:-0}"
"""


def claude(place: Path, limited: int, last: int = 0) -> dict[str, object]:
    """Make an agent named claude, which meets rate limits first, and return the clauses that it needs."""
    (place / "bin").mkdir()
    (place / "bin/claude").write_text(CLAUDE)
    (place / "bin/claude").chmod(0o755)
    (place / "count").write_text("0")
    env = {"COUNT": str(place / "count"), "LIMITED": str(limited), "LAST": str(last)}
    return {"read": [str(place / "bin")], "write": [str(place / "count")], "env": env, "net": "none"}


def test_a_rate_limit_is_a_wait_and_no_attempt(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_work, "FIRST_WAIT", 0.05)
    policy = claude(tmp_path, 2)
    done = run_loop(project, [f"{tmp_path}/bin/claude"], attempts=1, policy=policy)
    assert done.outcomes("a") == ["rate-limited", "rate-limited", "passed"] and done.phases == {"a": "landed"}
    assert [wait.seconds for wait in done.all(events.RateLimitWait)] == [0.05, 0.1]
    assert done.end is not None and done.end.spending.cost_usd == 1.5 and done.end.spending.tokens == 10


def test_a_budget_of_cost_ends_the_attempt_and_that_of_the_loop_ends_the_loop(
    project: Path, tmp_path: Path
) -> None:
    policy = claude(tmp_path, 0, last=1000)
    agent = [f"{tmp_path}/bin/claude"]
    done = run_loop(project, agent, attempts=1, policy=policy, budget={"attempt": {"cost": 1}})
    assert done.outcomes("a") == ["over-budget"] and "1 US dollars" in done.reasons("a")[0]
    done = run_loop(project, agent, attempts=1, policy=policy, budget={"loop": {"tokens": 9}})
    assert done.end is not None and (done.end.outcome, done.end.exit_code) == ("over-budget", 4)
    assert done.phases == {"a": "waiting"} and done.outcomes("a") == ["cancelled"]


def slots(tmp_path: Path) -> tuple[str, dict[str, object]]:
    """Return a shell command that gives each attempt a number of its own, and the clauses that it needs."""
    place = tmp_path / "slots"
    place.mkdir()
    return f"n=1; until mkdir {place}/$n 2>/dev/null; do n=$((n+1)); done", {"write": [str(place)]}


def test_the_first_of_several_attempts_that_passes_lands(project: Path, tmp_path: Path) -> None:
    number, policy = slots(tmp_path)
    agent = f"{number}; [ $n = 2 ] || sleep 1000; echo $n > number; {right('a')}"
    done = run_loop(project, agent, best_of=3, policy=policy)
    assert sorted(map(str, done.outcomes("a"))) == ["passed", "surpassed", "surpassed"]
    assert (project / "number").read_text() == "2\n" and stockade.Workspace.list() == []


def test_the_best_of_several_attempts_lands_by_the_scoring_command(project: Path, tmp_path: Path) -> None:
    number, policy = slots(tmp_path)
    agent = f"{number}; echo $n > number; {right('a')}"
    done = run_loop(project, agent, best_of=3, score="cat number", policy=policy)
    assert (project / "number").read_text() == "3\n" and done.phases == {"a": "landed"}


def test_the_judge_does_not_see_the_key_of_the_agent(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = claude(tmp_path, 0) | {"env": {**claude_env(tmp_path), "SEEN": "1"}}
    verify = "env; " + VERIFY
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    done = run_loop(project, [f"{tmp_path}/bin/claude"], verify=verify, policy=policy, report="none")
    assert done.phases == {"a": "landed"}
    lines = [event.text for event in done.all(events.JudgeLine)]
    assert "SEEN=1" in lines and not any("sk-secret" in line for line in lines)


def claude_env(place: Path) -> dict[str, str]:
    return {"COUNT": str(place / "count"), "LIMITED": "0"}


def test_a_verify_command_that_does_not_run_is_refused_before_any_agent_starts(project: Path) -> None:
    made = make_loop(project, "touch x", verify="no-such-runner -q")
    with pytest.raises(stockade.StockadeError, match="verify command does not run"):
        made.run()
    assert made.outcomes("a") == []


def test_control_characters_of_an_agent_reach_no_listener(project: Path) -> None:
    done = run_loop(project, r"printf '\033]0;title\007 \342\200\256x\n'; " + right("a"))
    assert all(event.text.isprintable() for event in done.all(events.AgentLine))
    assert "title" in done.all(events.AgentLine)[0].text


@pytest.mark.parametrize(
    "left",
    [
        "mkdir -p a/a; chmod 0 a/a",
        "mkfifo tests/pipe; rm -r tests; mkfifo tests",
    ],
    ids=["unreadable", "pipes"],
)
def test_changes_that_no_commit_can_take_are_the_attempts_failure_and_not_the_loops(
    project: Path, left: str
) -> None:
    done = run_loop(project, f"{right('a')}; ({left}); true", attempts=1)
    assert done.end is not None and done.end.outcome in ("done", "held", "incomplete"), done.end
    assert done.all(events.SandboxFailure) == [] and done.outcomes("a") in (["passed"], ["rejected"])


@pytest.mark.parametrize("way", ["> report.tap", "> other; ln -s other report.tap"], ids=["file", "link"])
def test_a_report_that_the_attempt_left_is_not_the_judges(project: Path, way: str) -> None:
    (project / "tests/run.sh").write_text(". ./values.sh\nsh tests/check.sh > report.tap\n")
    forged = f"printf '1..2\\nok - a\\nok - b\\n' {way}; echo 'exit 0' > values.sh"
    made = run_loop(project, forged, verify="sh tests/run.sh", report="report.tap", attempts=1)
    assert made.phases == {"a": "failed"}
    assert "report is missing" in made.reasons("a")[0]
