"""Policies as values: the model, its clauses, profiles, TOML, and the comparison of two policies."""

from __future__ import annotations

from stockade.controls import Control
from stockade.policy.model import Limits, Policy, PolicyLike, Reuse, Syscalls, WorkspaceRule
from stockade.policy.profile import Profile
from stockade.policy.toml import parse

__all__ = [
    "Control",
    "Limits",
    "Policy",
    "PolicyLike",
    "Profile",
    "Reuse",
    "Syscalls",
    "WorkspaceRule",
    "parse",
]
