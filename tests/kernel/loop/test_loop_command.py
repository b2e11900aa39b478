"""`stockade loop` as its users type it: exit codes, JSON, status, resume after a kill, trust."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

import stockade
from support.cli import STOCKADE, stockade_command
from support.loops import VERIFY, make_project, right

OPTIONS = ("--items", "items.toml", "--verify", VERIFY, "--report", "stdout", "--judge", "tests")
EACH = 'case "$(cat)" in *"Set a"*) n=a;; *"Set b"*) n=b;; *) n=c;; esac; sed -i s/^$n=0/$n=1/ values.sh'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = make_project(tmp_path / "project", "abc", good=())
    items = "".join(f'[[items]]\nid = "{name}"\ntitle = "Set {name}"\n' for name in "abc")
    (project / "items.toml").write_text(items)
    return project


def loop(project: Path, *words: str, agent: str = "") -> subprocess.CompletedProcess[str]:
    tail = ("--", "sh", "-c", agent) if agent else ()
    return stockade_command("loop", *words, *tail, cwd=project)


def values(project: Path) -> list[str]:
    return [line for line in (project / "values.sh").read_text().splitlines() if "=" in line]


def test_a_loop_prints_a_summary_or_events_and_status_and_logs_show_it_later(project: Path) -> None:
    done = loop(project, *OPTIONS, "--notify", "cat >> ../told; echo >> ../told", agent=EACH)
    assert done.returncode == 0, done.stderr
    assert "a: landed: 1 file, +1 -1" in done.stderr and "done: every item has landed" in done.stdout
    told = [json.loads(line) for line in (project.parent / "told").read_text().splitlines()]
    assert [one["event"] for one in told] == ["item-end"] * 3 + ["loop-end"]
    shown = json.loads(loop(project, "status", "--json").stdout)
    assert shown["state"] == "done" and [one["phase"] for one in shown["items"]] == ["landed"] * 3
    assert "ok - a" in loop(project, "logs", "a").stdout and "b 1 passed" in loop(project, "logs").stdout
    (project / "values.sh").write_text("a=0\nb=0\nc=0\n")
    done = loop(project, *OPTIONS, "--attempts", "1", "--json", agent="true")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and done.stderr == ""
    assert events[0]["event"] == "loop-start" and events[0]["backend"] and "files" in events[0]["mechanisms"]
    assert events[-1]["event"] == "loop-end" and events[-1]["outcome"] == "incomplete"


def test_a_dry_run_starts_nothing(project: Path) -> None:
    done = loop(project, *OPTIONS, "--dry-run", agent="touch /tmp/x; touch x")
    assert done.returncode == 0 and "inside the sandbox: sh -c" in done.stdout and "Set c" in done.stdout
    assert loop(project, "status").returncode == 125 and not (project / "x").exists()


@pytest.mark.parametrize(
    ("words", "agent", "told"),
    [
        (("--verify", "true"), "true", "no items are named"),
        (("--items", "items.toml"), "true", "nothing judges the item a"),
        (("--items", "items.toml", "--verify", "true"), "", "no agent is named"),
        ((*OPTIONS, "--budget", "attempt.tmie=3"), "true", "is not a budget"),
        ((*OPTIONS, "--judge", "/etc"), "true", "is not a path in the project"),
        ((*OPTIONS, "--budget", "attempt.time=abc"), "true", "--budget attempt.time=abc: is not a time"),
        ((*OPTIONS, "--judge", "tset"), "true", "the judge's file tset is not in the project"),
        ((*OPTIONS, "--score", "true"), "true", "score chooses between passed attempts"),
        ((*OPTIONS, "--git-commit"), "true", "not the top of a git repository"),
        (("retry", "x"), "", "no loop has worked in"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    project: Path, words: tuple[str, ...], agent: str, told: str
) -> None:
    done = loop(project, *words, agent=agent)
    assert done.returncode == 125 and told in done.stderr and "hint" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--items", "items.toml", "--verfy", "true"), "unknown option --verfy"),
        (("--items", "items.toml", "claude"), "the agent's command comes after --"),
    ],
)
def test_a_misspelled_option_and_a_missing_separator_are_named(
    project: Path, words: tuple[str, ...], told: str
) -> None:
    done = loop(project, *words)
    assert done.returncode == 2 and told in done.stderr, done.stderr


def test_a_refused_screen_leaves_no_loop_behind(project: Path) -> None:
    done = loop(project, *OPTIONS, "--tui", agent="true")
    assert done.returncode == 125 and "--tui needs a terminal" in done.stderr
    assert "no loop has worked in" in loop(project, "status").stderr


def test_commands_of_the_hook_do_not_go_on_in_a_rejected_attempt(project: Path) -> None:
    done = loop(project, *OPTIONS, "--strict", "--attempts", "1", agent="echo > rejected")
    assert done.returncode == 1 and "stockade loop logs a" in done.stderr, done.stderr
    kept = json.loads(stockade_command("workspaces", "--json", cwd=project).stdout)
    assert kept, "the attempts' workspaces are kept"
    ran = stockade_command("hook", "run", "--", "ls", cwd=project)
    assert ran.returncode == 0 and "values.sh" in ran.stdout and "rejected" not in ran.stdout


def test_the_project_may_set_the_commands_of_a_loop_only_if_it_is_trusted(project: Path) -> None:
    (project / "stockade.toml").write_text(
        f'[loop]\nitems = "items.toml"\nverify = "{VERIFY}"\njudge = ["tests"]\nreport = "stdout"\n'
        f'agent = ["sh", "-c", "{right("a")}"]\nnotify = "touch ../notified"\nattempts = 1\n'
        '[loop.budget.attempt]\ntime = "5m"\n'
    )
    done = loop(project)
    assert done.returncode == 125 and "stockade trust" in done.stderr
    assert not (project.parent / "notified").exists() and "a=0" in values(project)
    assert stockade_command("run", "--", "true", cwd=project).returncode == 0, "it is no part of the policy"
    assert stockade_command("trust", "--yes", cwd=project).returncode == 0
    done = loop(project)
    assert done.returncode == 1 and "a=1" in values(project) and (project.parent / "notified").exists()


def test_retry_and_skip_reach_a_loop_that_runs_and_one_that_does_not(project: Path) -> None:
    agent = f"{EACH}; [ $n != b ] || sleep 1000"
    running = subprocess.Popen(
        [STOCKADE, "loop", *OPTIONS, "--", "sh", "-c", agent], cwd=project, stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "b: attempt 1 begins" in line:
            break
    assert "asked the loop that runs" in loop(project, "skip", "b").stderr
    assert running.wait(60) == 1
    running.stderr.close()
    assert values(project) == ["a=1", "b=0", "c=1"]
    assert loop(project, "retry", "b").returncode == 0
    shown = json.loads(loop(project, "status", "--json").stdout)
    assert [one["phase"] for one in shown["items"]] == ["landed", "waiting", "landed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_pauses_or_ends_the_loop_which_resume_continues(project: Path, number: int) -> None:
    agent = f"{EACH}; echo started; sleep 1"
    running = subprocess.Popen(
        [STOCKADE, "loop", *OPTIONS, "-v", "--", "sh", "-c", agent],
        cwd=project,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "started" in line:
            break
    running.send_signal(number)
    assert running.wait(60) == 5
    running.stderr.close()
    assert values(project)[0] == ("a=1" if number == signal.SIGINT else "a=0")
    assert "c=0" in values(project)


def test_a_loop_that_is_killed_at_random_moments_loses_nothing_and_lands_nothing_twice(project: Path) -> None:
    """Each landing adds a line, so that one that happens twice shows."""
    seed = int(os.environ.get("STOCKADE_SEED") or random.randrange(1 << 30))
    print(f"STOCKADE_SEED={seed}")
    chance = random.Random(seed)
    (project / "landed.txt").write_text("")
    agent = f"{EACH}; echo $n >> landed.txt; echo home > pyvenv-$n.txt"
    words = [*OPTIONS, "--parallel", "2", "--", "sh", "-c", agent]
    kills = 6
    while True:
        running = subprocess.Popen(
            [STOCKADE, "loop", *words], cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, said = running.communicate(timeout=0.15 + chance.random() * 0.8 if kills else 60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            kills -= 1
            if (project.parent / "state/loops").exists() and loop(project, "status").returncode == 0:
                words = ["resume"]
        else:
            assert running.returncode == 0, said
            break
    assert values(project) == ["a=1", "b=1", "c=1"], f"STOCKADE_SEED={seed}"
    assert sorted((project / "landed.txt").read_text().split()) == ["a", "b", "c"], f"STOCKADE_SEED={seed}"
    shown = json.loads(loop(project, "status", "--json").stdout)
    assert shown["state"] == "done" and [one["phase"] for one in shown["items"]] == ["landed"] * 3
    _discard_orphans(project)


def _discard_orphans(project: Path) -> None:
    """A killed loop may leave a workspace that it had not recorded yet; `stockade workspaces` lists it."""
    for workspace in stockade.Workspace.list():
        assert workspace.path == str(project)
        workspace.discard()
