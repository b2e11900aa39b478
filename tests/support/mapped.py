"""Sandboxes whose plan maps ids of its own and lets root inside keep capabilities, for tests of the gate.

No policy asks for that: the plan of an ordinary policy is changed before it is launched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from stockade.backends.backend import PlanInputs
from stockade.backends.native import Native
from stockade.gate import client, wire
from stockade.gate import operations as ops
from stockade.linux import subordinate_ids
from stockade.policy import Policy
from stockade.runs import prepare
from support.means import applies, need

Rows = tuple[tuple[int, int, int], ...]

#: Where root's range begins outside.
BASE = 0x70000000
#: All that root inside can keep, as /proc has it.
KEPT = f"{wire.KEEPABLE:016x}"


def own_rows() -> tuple[Rows, Rows]:
    """Users and groups: 0 is the caller, and nobody else is there."""
    return ((0, os.geteuid(), 1),), ((0, os.getegid(), 1),)


def range_rows() -> tuple[Rows, Rows]:
    """Users and groups: 0 is the caller, and from 1 on are ids that no user of the machine has."""
    users, groups = own_rows()
    if os.geteuid() == 0:
        return (*users, (1, BASE + 1, 65535)), (*groups, (1, BASE + 1, 65535))
    uid = os.geteuid()
    need(not subordinate_ids.why_none(uid), f"no subordinate ids: {subordinate_ids.why_none(uid)}")
    first, count = subordinate_ids.ranges(subordinate_ids.USERS, uid)[0]
    others, many = subordinate_ids.ranges(subordinate_ids.GROUPS, uid)[0]
    return (*users, (1, first, min(count, 65535))), (*groups, (1, others, min(many, 65535)))


def altered(plan: ops.Plan, rows: tuple[Rows, Rows], keep: int, joins: bool) -> ops.Plan:
    """The plan with these ids and capabilities."""
    applies(not plan.plain and not plan.helped, "only the native backend maps ids")

    def alter(op: ops.Op) -> ops.Op:
        if isinstance(op, ops.Namespaces):
            return msgspec.structs.replace(op, ids=rows[0], group_ids=rows[1], joins_network=joins)
        return msgspec.structs.replace(op, keep=keep) if isinstance(op, ops.Privileges) else op

    return ops.Plan(plan.backend, plan.base, tuple(map(alter, plan.ops)))


@contextmanager
def mapped(
    rows: tuple[Rows, Rows] | None = None, *, keep: int = wire.KEEPABLE, network: int = -1
) -> Iterator[None]:
    """Sandboxes that are opened meanwhile have these ids and capabilities, and join this network, if any."""
    chosen = range_rows() if rows is None else rows
    with pytest.MonkeyPatch.context() as patch:
        plan, resident = Native.plan, Native.resident

        def altered_plan(given: PlanInputs) -> ops.Plan:
            return altered(plan(given), chosen, keep, network >= 0)

        def mapped_kind(policy: Policy) -> str:
            return f"mapped-{resident(policy)}" if len(chosen[0]) > 1 else resident(policy)

        patch.setattr(Native, "plan", staticmethod(altered_plan))
        patch.setattr(Native, "resident", staticmethod(mapped_kind))
        if network >= 0:
            made = prepare.prepare

            def joining(*arguments: Any, **options: Any) -> prepare.RunPreparation:
                return msgspec.structs.replace(made(*arguments, **options), network=network)

            patch.setattr("stockade.sandbox.sandbox.prepare", joining)
        yield


@contextmanager
def programs_as(uid: int, gid: int | None = None) -> Iterator[None]:
    """Programs that are started meanwhile run as this user and group inside."""
    kind = client.Program

    def program(**options: Any) -> client.Program:
        return kind(**{**options, "uid": uid, "gid": gid})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Program", program)
        yield
