"""A gate that secretly leaves out one step: whatever it is, nothing may run.

The sabotaged gate drops the step and says that it was done. Either the gate's
own second look or the supervisor's evidence has to notice.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox, SetupError
from stockade.backends.mechanisms import LANDLOCK_SCOPES
from stockade.gate import client
from stockade.gate import operations as ops
from stockade.host import CGROUP_PROBES, host
from stockade.resolve.environment import EnvironmentMount
from stockade.runs import prepare
from stockade.workspace import disk_image
from support import leaks
from support.environments import environment, open_beneath, private_tree
from support.mapped import Rows, mapped, own_rows, range_rows
from support.means import applies, need

Order = Callable[[str], None]
NOTHING = "op:9999"
#: A cgroup for each.
LIMITS = {"files": 512, "memory": "256M", "tasks": 32, "cpu": 1.5, "cpu_time": "60s"}
CGROUPS = all(host().has(name) for name in CGROUP_PROBES)


@pytest.fixture
def order(sabotaged_gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """Says what the next resident gate leaves out."""

    def give(word: str) -> None:
        client.shutdown()
        monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (word,))

    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sabotaged_gate))
    yield give
    client.shutdown()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


@pytest.fixture(params=["overlay", "rw", "open network", "deny", "exec", "limits", "landlock"])
def policy(request: pytest.FixtureRequest, tmp_path: Path, workspace: Path, out: Path) -> Policy:
    """Between them, these have an operation of every kind."""
    data = tmp_path / "data"
    data.mkdir()
    for name in (".git/hooks", ".vscode", "a"):
        (workspace / name).mkdir(parents=True)
    for name in (".env", "a/b"):
        (workspace / name).write_text("")
    if request.param == "landlock":
        return Policy(
            backend="landlock",
            accept=["files", "processes", "devices"],
            read=[str(data)],
            write=[str(out)],
            limits=LIMITS if CGROUPS else {"files": 512},
        )
    mode = "rw" if request.param == "rw" else "overlay"
    return Policy(
        workspace={"path": str(workspace), "mode": mode},
        read=[str(data)],
        write=[str(out)],
        protect=[".git/hooks", ".vscode"],
        net="open" if request.param == "open network" else (),
        limits=LIMITS if request.param == "limits" and CGROUPS else {"files": 512},
        # Two in one tree, so that the tree is there without the one that is left out.
        deny=[str(workspace / ".env"), str(workspace / "a/b"), "/usr/bin/env", "/usr/bin/awk"]
        if request.param == "deny"
        else (),
        exec=["/usr/bin/touch"] if request.param == "exec" else None,
    )


def plan_of(policy: Policy, command: str = "touch", observe: prepare.Observation = "") -> ops.Plan:
    prepared = prepare.prepare(policy, command=[command], observe=observe)
    prepared.close(discard=True)
    return prepared.plan


def starts(policy: Policy, out: Path, *, explain: bool = False) -> bool:
    """Whether the command came to run, by what it would have left and by what the caller was told."""
    marker = out / "marker"
    refused = False
    try:
        stockade.run(["touch", str(marker)], policy, explain=explain)
    except SetupError:
        refused = True
    touched = marker.exists()
    marker.unlink(missing_ok=True)
    return touched or not refused


def test_a_sabotaged_gate_that_drops_nothing_runs_the_command(
    policy: Policy, out: Path, order: Order
) -> None:
    order(NOTHING)
    stockade.run(["touch", str(out / "marker")], policy).check()
    assert (out / "marker").exists()


def test_no_operation_of_the_plan_can_be_left_out(policy: Policy, out: Path, order: Order) -> None:
    # The namespaces, operation 0, are not executed by the gate but given to clone; see the flags below.
    plan = plan_of(policy)
    unnoticed = []
    for index, op in list(enumerate(plan.ops))[1:]:
        order(f"op:{index}")
        if starts(policy, out):
            unnoticed.append(f"{index}: {op.describe()}")
    assert unnoticed == []


@pytest.mark.parametrize("limits", [{}, {"disk": "20M"}], ids=["on the disk", "in memory"])
def test_no_mount_of_a_private_environment_can_be_left_out(
    limits: dict[str, str], order: Order, stockade_home: Path
) -> None:
    policy = Policy(toolchain=False, limits=limits)
    with private_tree(stockade_home) as tree:
        inner = open_beneath(tree, "/mnt/inner/most", create=True)
        try:
            more = (EnvironmentMount("/mnt/inner/most", inner, "read", "test"),)
            given = environment(tree, ("/workspace", "/data"), more=more)
            prepared = prepare.prepare(policy, environment=given)
            prepared.close(discard=True)
            unnoticed = []
            for index, op in enumerate(prepared.plan.ops):
                if op.clause not in ("environment", "test"):
                    continue
                order(f"op:{index}")
                with contextlib.suppress(SetupError), Sandbox(policy, _environment=given, on_exit="discard"):
                    unnoticed.append(f"{index}: {op.describe()}")
            assert unnoticed == []
            order(NOTHING)
            with Sandbox(policy, _environment=given, on_exit="discard") as box:
                box.run(["true"]).check()
        finally:
            os.close(inner)


def test_none_can_be_left_out_by_what_is_made_ahead(order: Order) -> None:
    """Without grants it does everything but what waits for the launch: the last operation of each kind."""
    plan = plan_of(Policy(), "true")
    unnoticed = []
    for kind, index in {type(op): i for i, op in enumerate(plan.ops) if i > plan.base}.items():
        order(f"op:{index}")
        for attempt in range(3):
            if attempt == 2:
                assert leaks.settled(lambda: [] if any(p.spare for p in leaks.family()) else ["none"]) == []
            with contextlib.suppress(SetupError):
                stockade.run(["true"])
                unnoticed.append(f"{kind.__name__} {attempt}")
    assert unnoticed == []


def test_no_namespace_can_be_left_out(policy: Policy, out: Path, order: Order) -> None:
    unnoticed = []
    for name in plan_of(policy).namespaces.names:
        order(f"flags:{ops.NAMESPACES[name]:#x}")
        if starts(policy, out):
            unnoticed.append(name)
    assert unnoticed == []


def test_the_id_maps_cannot_be_left_out(policy: Policy, out: Path, order: Order) -> None:
    applies(policy.backend != "landlock", "a sandbox without namespaces has no maps")
    order("maps")
    assert not starts(policy, out)


def test_another_filter_cannot_be_installed(policy: Policy, out: Path, order: Order) -> None:
    order("filter")
    assert not starts(policy, out)


def test_the_scopes_of_landlock_cannot_be_left_out(policy: Policy, out: Path, order: Order) -> None:
    need(host().landlock >= LANDLOCK_SCOPES, "this Landlock has no scopes")
    order("scopes")
    assert not starts(policy, out)


def test_the_observer_cannot_be_left_out(out: Path, order: Order) -> None:
    policy = Policy(write=[str(out)])
    last = len(plan_of(policy, observe="refusals").ops) - 1
    order(NOTHING)
    assert starts(policy, out, explain=True)
    for left_out in (f"op:{last - 1}", f"op:{last}", "filter", "seccomp:16"):
        order(left_out)
        assert not starts(policy, out, explain=True), left_out
    with pytest.raises(SetupError, match="observes the calls already") as caught:
        stockade.run(["true"], explain=True)
    assert "--explain" in caught.value.hint


def test_every_kind_of_operation_was_among_those_left_out(tmp_path: Path, workspace: Path, out: Path) -> None:
    (workspace / ".vscode").mkdir()
    (tmp_path / "data").mkdir()
    seen: set[type[ops.Op]] = set()
    for mode in ("overlay", "rw"):
        policy = Policy(
            workspace={"path": str(workspace), "mode": mode},
            read=[str(tmp_path / "data")],
            write=[str(out)],
            protect=[".vscode"],
            deny=[str(workspace / ".env")] if mode == "overlay" else (),
            limits=LIMITS if CGROUPS else {"files": 512},
        )
        seen |= {type(op) for op in plan_of(policy).ops}
    # An image takes root and a loop device, and has a test of its own; so has what a helper is told.
    # Ports are granted to egress processes: tests/kernel/egress/test_walls.py. An observer is above.
    kinds = {kind for kind in ops.Op.__subclasses__() if kind.__module__ == ops.__name__}
    assert seen == kinds - (set() if CGROUPS else {ops.JoinCgroup}) - {
        ops.Image, ops.PortGrant, ops.Observe,
    }  # fmt: skip


class TestMappedIds:
    """What a plan with ids and capabilities of its own adds to the others."""

    @pytest.fixture(params=[own_rows, range_rows], ids=["caller alone", "with a range"])
    def rows(self, request: pytest.FixtureRequest) -> tuple[Rows, Rows]:
        found: tuple[Rows, Rows] = request.param()
        return found

    @pytest.fixture
    def policy(self, out: Path) -> Policy:
        return Policy(write=[str(out)])

    def test_nothing_of_it_can_be_left_out(
        self, policy: Policy, out: Path, order: Order, rows: tuple[Rows, Rows]
    ) -> None:
        with mapped(rows):
            order(NOTHING)
            assert starts(policy, out)
            privileges = [type(op) for op in plan_of(policy).ops].index(ops.Privileges)
            for left_out in (f"op:{privileges}", "maps", f"flags:{ops.NAMESPACES['user']:#x}"):
                order(left_out)
                assert not starts(policy, out), left_out

    def test_a_network_that_was_to_be_joined_cannot_be_another_one(
        self, policy: Policy, out: Path, order: Order
    ) -> None:
        for left_out, expected in ((NOTHING, True), ("join", False)):
            order(left_out)
            with Sandbox(Policy()) as first:
                assert first._box is not None
                with mapped(own_rows(), network=first._box.network_fd):
                    assert starts(policy, out) is expected

    def test_nothing_of_it_can_be_left_out_by_what_is_made_ahead(self, order: Order) -> None:
        with mapped(own_rows()):
            index = [type(op) for op in plan_of(Policy(), "true").ops].index(ops.Privileges)
            order(f"op:{index}")
            for _ in range(3):
                with pytest.raises(SetupError):
                    stockade.run(["true"])


def test_an_image_cannot_be_left_out(workspace: Path, out: Path, order: Order) -> None:
    applies(os.geteuid() == 0, "only root mounts an image")
    need(not disk_image.missing(), f"no images: {disk_image.missing()}")
    rule = {"path": str(workspace), "durable": True}
    policy = Policy(workspace=rule, write=[str(out)], limits={"disk": "8M"}, protect=[])
    order(NOTHING)
    assert starts(policy, out)
    index = [type(op) for op in plan_of(policy).ops].index(ops.Image)
    order(f"op:{index}")
    assert not starts(policy, out)
