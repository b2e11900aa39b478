"""Policies as values: the model, its clauses, profiles, TOML, and the comparison of two policies."""

from __future__ import annotations

from stockade.policy.model import Limits, Policy, Reuse, Syscalls, WorkspaceRule
from stockade.policy.profile import Profile
from stockade.policy.toml import parse

__all__ = ["Limits", "Policy", "Profile", "Reuse", "Syscalls", "WorkspaceRule", "parse"]
