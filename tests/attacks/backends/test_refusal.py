"""A control that cannot be had: the run is refused, with the reason, and nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, Sandbox, UnsupportedError
from stockade.gate import client
from stockade.host import Host
from stockade.runs import prepare

LIMIT = {"limits": {"tasks": 8}}
#: The probe that fails, the policy that needs it, and the control that is missed.
MISSING = [
    ("userns", {}, "processes"),
    ("mountapi", {}, "files"),
    ("pidns", {}, "processes"),
    ("pidfd", {}, "cleanup"),
    ("netns", {}, "network.none"),
    ("ipcns", {}, "ipc"),
    ("landlock", {}, "files"),
    ("seccomp", {}, "syscalls"),
    ("seccomp", {}, "terminal"),
    ("overlay", {"workspace": "."}, "workspace.overlay"),
    ("nproc cgroup.pids", LIMIT, "limits.tasks"),
    ("cgroup.memory", {"limits": {"memory": "64M"}}, "limits.memory"),
    ("cgroup.cpu", {"limits": {"cpu": 0.5}}, "limits.cpu"),
    ("cgroup.cpuacct", {"limits": {"cpu_time": "1s"}}, "limits.cpu_time"),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every attempt to start something."""
    seen: list[object] = []
    start = client.launch

    def noting(*args: Any, **options: Any) -> client.Connection:
        seen.append(args)
        return start(*args, **options)

    monkeypatch.setattr(client, "launch", noting)
    return seen


def pretend(monkeypatch: pytest.MonkeyPatch, *without: str) -> None:
    made_up = Host.pretend(without=(*without, "bwrap"))
    monkeypatch.setattr(prepare, "host", lambda **_: made_up)
    prepare._selected.cache_clear()
    monkeypatch.setattr(prepare, "_selected", prepare._selected.__wrapped__)


@pytest.mark.parametrize(("probe", "clauses", "control"), MISSING, ids=str)
def test_without_the_means_for_a_control_nothing_starts(
    monkeypatch: pytest.MonkeyPatch,
    launches: list[object],
    workspace: Path,
    probe: str,
    clauses: dict[str, Any],
    control: str,
) -> None:
    monkeypatch.chdir(workspace)
    mark = workspace / "started"
    policy = Policy(**clauses, write=[str(workspace)] if "workspace" not in clauses else [])
    pretend(monkeypatch, *probe.split())
    for start in (lambda: stockade.run(["touch", str(mark)], policy), lambda: Sandbox(policy).open()):
        with pytest.raises(UnsupportedError, match=control.replace(".", r"\.")) as refusal:
            start()
        assert control in refusal.value.missing["native"]
        assert refusal.value.hint
    assert launches == [] and not mark.exists()


def test_with_the_means_the_same_run_starts(launches: list[object], workspace: Path) -> None:
    mark = workspace / "started"
    assert stockade.run(["touch", str(mark)], Policy(write=[str(workspace)])).ok
    assert len(launches) == 1 and mark.exists()


def test_only_what_is_accepted_by_name_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, launches: list[object]
) -> None:
    pretend(monkeypatch, "nproc", "cgroup.pids", "netns")
    with pytest.raises(UnsupportedError) as refusal:
        stockade.run(["true"], Policy(**LIMIT, accept=["limits.tasks"]))
    assert set(refusal.value.missing["native"]) == {"network.none"}
    assert launches == []


def test_what_nothing_could_start_without_cannot_be_accepted_away(
    monkeypatch: pytest.MonkeyPatch, launches: list[object]
) -> None:
    from stockade.policy import Control

    pretend(monkeypatch, "userns", "landlock")
    with pytest.raises(UnsupportedError):
        stockade.run(["true"], Policy(accept=[control.value for control in Control]))
    assert launches == []


@pytest.mark.parametrize("backend", ["gvisor", "container", "microvm", "bwrap", "landlock", "seatbelt"])
def test_a_backend_that_is_not_there_is_never_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, launches: list[object], backend: str
) -> None:
    pretend(monkeypatch)
    with pytest.raises(stockade.StockadeError, match=backend):
        stockade.run(["true"], Policy(backend=backend))
    assert launches == []


def test_an_image_that_is_not_there_is_never_replaced_by_the_host(launches: list[object]) -> None:
    with pytest.raises(stockade.StockadeError, match="image"):
        stockade.run(["true"], Policy(image="debian:12"))
    assert launches == []
