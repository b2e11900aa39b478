"""Why a rule of `net` is not one."""

from __future__ import annotations


class NetRuleError(ValueError):
    """A rule, or a name, is not valid; `hint` says what to write."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
