"""Policies: the model, profiles, the layers they come from, and where they meet the file system."""

from __future__ import annotations

from stockade.policy.caller import Caller
from stockade.policy.load import Discovered, discover, load, merge
from stockade.policy.model import Limits, Policy, Reuse, Syscalls, WorkspaceRule
from stockade.policy.profile import Profile
from stockade.policy.resolve import Grant, Resolved, resolve
from stockade.policy.text import parse

__all__ = [
    "Caller",
    "Discovered",
    "Grant",
    "Limits",
    "Policy",
    "Profile",
    "Resolved",
    "Reuse",
    "Syscalls",
    "WorkspaceRule",
    "discover",
    "load",
    "merge",
    "parse",
    "resolve",
]
