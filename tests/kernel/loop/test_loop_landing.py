"""Landing, order, conflicts, held-back files, people's wishes, and sandboxes that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import stockade
from stockade.loop import events
from stockade.loop.events import LoopEvent
from stockade.loop.items.item import WorkItem
from stockade.loop.loop import Loop
from stockade.loop.record import LoopError, is_locked
from stockade.loop.work.landing import JUDGES
from support.loops import LoopRun, make_loop, make_project, right, run_loop
from support.means import need_program

ITEMS = (WorkItem(id="a", title="Set a"), WorkItem(id="b", title="Set b"), WorkItem(id="c", title="Set c"))
#: Does what the title asks for.
EACH = 'case "$(cat)" in *"Set a"*) n=a;; *"Set b"*) n=b;; *) n=c;; esac; sed -i s/^$n=0/$n=1/ values.sh'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", "abc", good=())


def values(project: Path) -> list[str]:
    return [line for line in (project / "values.sh").read_text().splitlines() if "=" in line]


def test_items_land_in_order_and_each_is_judged_with_those_before_it(project: Path) -> None:
    done = run_loop(project, f"{EACH}; [ $n = c ] || sleep 0.5", ITEMS, parallel=3)
    assert [event.item for event in done.all(events.Landing)] == ["a", "b", "c"]
    assert values(project) == ["a=1", "b=1", "c=1"] and stockade.Workspace.list() == []
    again = [event for event in done.all(events.JudgeStart) if event.again]
    conflicts = done.all(events.LandingConflict)
    assert again or conflicts, "attempts that began together are judged again on the new base"


def test_a_conflict_is_a_new_attempt_on_the_new_base_and_does_not_count(project: Path) -> None:
    def edit(event: LoopEvent) -> None:
        if isinstance(event, events.AgentLine) and event.attempt == 1:
            (project / "values.sh").write_text((project / "values.sh").read_text().replace("a=0", "a=7"))

    agent = "sed -i s/^a=./a=1/ values.sh; echo changed; sleep 0.4"
    done = run_loop(project, agent, attempts=1, on_event=edit)
    assert done.outcomes("a") == ["conflict", "passed"] and values(project)[0] == "a=1"
    assert done.all(events.LandingConflict)[0].paths == ("values.sh",)


def test_files_that_tools_obey_wait_for_a_person_and_so_do_their_dependents(project: Path) -> None:
    items = (ITEMS[0], WorkItem(id="b", title="Set b", depends_on=("a",)), ITEMS[2])
    agent = f"{EACH}; [ $n = a ] && echo home = /evil > pyvenv.cfg; true"
    done = run_loop(project, agent, items)
    assert done.phases == {"a": "held", "b": "waiting", "c": "landed"}
    assert done.end is not None and done.end.exit_code == 3 and values(project) == ["a=1", "b=0", "c=1"]
    held = done.all(events.HeldBackFiles)[0]
    assert [one.path for one in held.files] == ["pyvenv.cfg"] and not (project / "pyvenv.cfg").exists()
    assert done.run().exit_code == 3, "they still wait"
    stockade.Workspace.open(held.workspace).commit(allow_exec_config=True)
    assert done.run().exit_code == 0 and values(project) == ["a=1", "b=1", "c=1"]


def test_an_attempt_that_passes_cannot_weaken_the_judge_of_the_next_ones(project: Path) -> None:
    work = "rm tests/wanted; echo hidden > conftest.py; echo more > tests/new.sh"
    done = run_loop(project, f"sed -i s/=0/=1/ values.sh; {work}", attempts=1)
    assert done.phases == {"a": "held"} and values(project)[0] == "a=1"
    assert (project / "tests/wanted").exists() and not (project / "conftest.py").exists()
    assert (project / "tests/new.sh").exists(), "new tests land"
    held = done.all(events.HeldBackFiles)[0]
    assert {one.path: one.why for one in held.files} == dict.fromkeys(("conftest.py", "tests/wanted"), JUDGES)
    stockade.Workspace.open(held.workspace).commit(allow_exec_config=True)
    assert (project / "conftest.py").exists() and not (project / "tests/wanted").exists()


def test_what_depends_on_a_failed_item_is_skipped_until_that_is_retried(project: Path) -> None:
    items = (ITEMS[0], WorkItem(id="b", title="Set b", depends_on=("a",)))
    done = make_loop(project, f"{EACH}; [ -e good ] || git 2>/dev/null", items, attempts=1, strict=False)
    done.loop.edit("a", verify="test -e good")
    assert done.run().exit_code == 1 and done.phases == {"a": "failed", "b": "skipped"}
    assert "depends on a, which failed" in done.loop.record.find("b").reason
    done.loop.edit("a", verify="true", body="now it is easy")
    done.loop.retry("a")
    assert done.run().exit_code == 0 and done.phases == {"a": "landed", "b": "landed"}


def test_a_person_can_skip_an_item_that_is_being_worked_on(project: Path) -> None:
    def skip(event: LoopEvent) -> None:
        if isinstance(event, events.AgentLine):
            threading.Thread(target=done.loop.skip, args=("a",)).start()

    agent = f"{EACH}; echo working; [ $n = b ] || sleep 1000"
    done = make_loop(project, agent, ITEMS[:2], on_event=skip)
    assert done.run().exit_code == 1 and done.phases == {"a": "skipped", "b": "landed"}
    with pytest.raises(LoopError, match="landed"):
        done.loop.skip("b")


def test_pause_finishes_the_attempt_and_kill_ends_it(project: Path) -> None:
    def pause(event: LoopEvent) -> None:
        if isinstance(event, events.AttemptStart):
            (done.loop.kill if event.item == "b" else done.loop.pause)()

    done = make_loop(project, f"{EACH}; [ $n != b ] || sleep 1000", ITEMS[:2], on_event=pause)
    assert done.run().exit_code == 5 and done.phases == {"a": "landed", "b": "waiting"}
    assert done.run().exit_code == 5 and done.outcomes("b") == ["cancelled"]
    again = LoopRun(Loop(done.loop.store))
    threading.Timer(1.5, again.loop.kill).start()
    assert again.run().outcome == "paused" and again.phases == {"a": "landed", "b": "waiting"}


def test_a_sandbox_that_fails_stops_the_loop_and_is_no_failure_of_an_item(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()

    def remove(event: LoopEvent) -> None:
        if isinstance(event, events.Landing) and event.item == "a":
            shutil.rmtree(tmp_path / "data")

    done = run_loop(project, EACH, ITEMS, policy={"read": [str(tmp_path / "data")]}, on_event=remove)
    assert done.end is not None and (done.end.outcome, done.end.exit_code) == ("sandbox-error", 70)
    assert done.phases == {"a": "landed", "b": "waiting", "c": "waiting"}
    failure = done.all(events.SandboxFailure)[0]
    assert "data" in failure.message and "Traceback" in Path(failure.log).read_text()
    (tmp_path / "data").mkdir()
    assert done.loop.run().exit_code == 0, "nothing was counted against the items"


def test_no_agent_starts_if_the_machine_does_not_enforce_the_policy(project: Path, tmp_path: Path) -> None:
    made = make_loop(project, "touch x", policy={"backend": "bwrap", "image": "host", "limits": {"cpu": 1}})
    made.loop.record.policy["backend"] = "landlock"
    made.loop.record.policy["limits"] = {"disk": 1 << 30}
    made.loop.store.save(made.loop.record)
    again = LoopRun(Loop(made.loop.store))
    assert again.run().outcome == "sandbox-error" and again.outcomes("a") == []


def test_two_loops_do_not_work_on_one_project(project: Path) -> None:
    def other(event: LoopEvent) -> None:
        if isinstance(event, events.AttemptStart):
            with pytest.raises(LoopError, match="another loop works on"):
                make_loop(project, "true").run()
            seen.append(is_locked(str(project)))

    seen: list[bool] = []
    run_loop(project, right("a"), on_event=other)
    assert seen == [True] and not is_locked(str(project))


def test_a_policy_under_which_attempts_would_not_be_apart_is_refused(project: Path) -> None:
    with pytest.raises(LoopError, match="keeps every attempt apart"):
        make_loop(project, "true", policy={"workspace": {"path": str(project), "mode": "rw"}})
    with pytest.raises(LoopError, match="lies in the project"):
        make_loop(project, "true", policy={"write": [str(project / "tests")]})


def git(project: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=project, capture_output=True, text=True, check=True)
    return done.stdout


def test_each_item_becomes_a_git_commit_with_its_receipt_and_no_hook_runs(
    project: Path, tmp_path: Path
) -> None:
    need_program("git")
    git(project, "init", "-q")
    git(project, "config", "user.name", "Ada")
    git(project, "config", "user.email", "ada@example.org")
    (project / ".gitignore").write_text("*.log\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "First")
    hook = project / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    hook.chmod(0o755)
    (project / "staged.txt").write_text("the user's\n")
    git(project, "add", "staged.txt")
    agent = f"{EACH}; rm -f untracked.txt; mkdir -p new/deep; echo 1 > new/deep/$n; echo x > x.log"
    done = run_loop(project, agent, ITEMS[:2], git_commit=True)
    assert done.end is not None and done.end.exit_code == 0
    assert [one.text for one in done.all(events.LoopWarning) if "--strict" not in one.text] == []
    landed = done.all(events.Landing)
    assert git(project, "log", "--format=%H").split()[:2] == [one.git_commit for one in reversed(landed)]
    assert f"Stockade-Receipt: {landed[0].receipts[0]}" in git(project, "log", "-1", "--format=%B", "HEAD~1")
    changed = git(project, "show", "--name-only", "--format=", "HEAD~1").split()
    assert changed == ["new/deep/a", "untracked.txt", "values.sh"]
    assert git(project, "status", "--porcelain").split() == ["A", "staged.txt"], "the user's stays staged"
    assert not (tmp_path / "ran").exists()


def test_what_someone_adds_to_a_workspace_after_the_judgement_does_not_land(project: Path) -> None:
    def add(event: LoopEvent) -> None:
        if isinstance(event, events.AttemptEnd) and (event.item, event.attempt) == ("b", 1):
            with stockade.Workspace.open(event.workspace).files as files:
                files.write(f"{project}/added", "nobody judged this")

    # The second item passes and waits for the first, which takes its time and fails.
    agent = 'case "$(cat)" in *"Set a"*) sleep 2;; *) sed -i s/^b=0/b=1/ values.sh;; esac'
    items = (WorkItem(id="a", title="Set a", attempts=1), ITEMS[1])
    done = make_loop(project, agent, items, on_event=add, parallel=2)
    done.run()
    assert done.phases == {"a": "failed", "b": "landed"} and done.outcomes("b") == ["rejected", "passed"]
    assert not (project / "added").exists()


def test_names_that_are_not_text_land_or_wait_like_others(project: Path, tmp_path: Path) -> None:
    odd = b"x\xff\x1b[2J"
    told = tmp_path / "told"
    name = "$(printf 'x\\377\\033[2J')"
    agent = f'{right("a")}; touch "{name}"; mkdir pytest; touch "pytest/{name}"'
    done = run_loop(project, agent, notify=f"cat >> {told}")
    assert done.phases == {"a": "held"} and os.path.exists(os.fsencode(project) + b"/" + odd)
    read_again = done.loop.store.read().find("a")
    assert os.fsencode(read_again.paths[-1]) == odd
    assert done.end is not None and "\\xff" in done.end.items[0].held[-1].path
    assert b"loop-end" in told.read_bytes()
