"""A plan whose programs are observed: the ordinary one with another filter, and an observer behind it."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from stockade.backends.seccomp import observed_calls
from stockade.errors import UnsupportedError
from stockade.gate import operations as ops


@lru_cache(maxsize=64)
def observed(plan: ops.Plan, everything: bool) -> ops.Plan:
    """Return the plan with an observer; `everything`: of what succeeds, too."""
    last = plan.ops[-1]
    if plan.helped or not isinstance(last, ops.Seccomp):
        raise UnsupportedError(
            f"explain: the {plan.backend} backend cannot observe programs",
            hint='use backend = "native"',
        )
    if any(isinstance(op, ops.Privileges) and op.keep for op in plan.ops):
        raise UnsupportedError(
            "explain: programs that keep capabilities cannot be observed",
            hint="explain the command in a sandbox of this machine's files",
        )
    watch = ops.Observe(program=last.program, everything=everything, clause="explain")
    filter = ops.Seccomp(program=observed_calls.notifying(last.program), clause=last.clause)
    return msgspec.structs.replace(plan, ops=(*plan.ops[:-1], watch, filter))
