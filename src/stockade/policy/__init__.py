"""Policies as values: the model, its clauses, profiles, TOML, and the comparison of two policies."""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
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

#: Public names and their modules, which load on first use: the egress process needs the rules of `net` alone.
_LAZY = {
    "Control": "stockade.controls",
    "Limits": "stockade.policy.model",
    "Policy": "stockade.policy.model",
    "PolicyLike": "stockade.policy.model",
    "Profile": "stockade.policy.profile",
    "Reuse": "stockade.policy.model",
    "Syscalls": "stockade.policy.model",
    "WorkspaceRule": "stockade.policy.model",
    "parse": "stockade.policy.toml",
}

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)
