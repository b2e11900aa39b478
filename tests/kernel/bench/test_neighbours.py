"""`stockade bench neighbours`: what of it does not depend on how quick anything is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import stockade
from stockade.bench import neighbours, neighbours_command
from stockade.inside import lock_jobs
from support.means import need_program

CONTROL = neighbours.NeighbourCosts(
    job="spin", done=9, starts=9, start=0.01, longest_start=0.1, host=0.01, longest_host=0.1,
    late=0.1, outcome="timed-out",
)  # fmt: skip


def test_each_job_does_something_inside() -> None:
    code = Path(lock_jobs.__file__).read_text().replace('if __name__ == "__main__":', "if False:")
    code += "\nfor name in JOBS:\n    step = JOBS[name]()\n    step()\n    print(name)\n"
    result = stockade.run([neighbours.PYTHON, "-I", "-c", code], timeout=60)
    assert result.check().text.split() == list(lock_jobs.JOBS)


def test_a_job_runs_beside_its_neighbours_until_its_time_is_over() -> None:
    need_program("unshare")
    control, joins = neighbours.measure(["multicast"], 0.8, 3, lambda sentence: None)
    assert (control.job, joins.job) == ("spin", "multicast")
    for one in (control, joins):
        assert one.starts > 0 and one.outcome == "timed-out"
        assert 0 < one.start <= one.longest_start and 0 < one.host <= one.longest_host


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--seconds", "nan"], ["--tasks", "0"]])
def test_a_measurement_of_nothing_is_refused(words: list[str]) -> None:
    with pytest.raises(stockade.PolicyError, match="more than 0"):
        neighbours_command.main(words)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"longest_start": 0.55}, ""),
        ({"longest_start": 0.7}, "a neighbour waits"),
        ({"longest_host": 7.0}, "the host waits"),
        ({"late": 3.0, "outcome": "setup-failed"}, "it ends late; its outcome is setup-failed"),
    ],
)
def test_a_job_is_judged_by_the_control(change: dict[str, object], verdict: str) -> None:
    assert neighbours.judged(msgspec.structs.replace(CONTROL, **change), CONTROL).verdict == verdict
