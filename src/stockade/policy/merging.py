"""Merge one policy into another, clause by clause."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stockade.policy.model import Policy


def merge(policy: Policy, flags: Mapping[str, Any]) -> Policy:
    """Merge flags into a policy: lists grow, tables merge, other values are replaced; None changes nothing.

    >>> merge(Policy(read=["/a"]), {"read": ["/b"], "limits": {"wall": "5s"}}).read
    ('/a', '/b')
    """
    return Policy(**overlay_tables(policy.table(full=True), flags, grow=True)) if flags else policy


def overlay_tables(lower: Mapping[str, Any], upper: Mapping[str, Any], *, grow: bool) -> dict[str, Any]:
    result = dict(lower)
    for key, written in upper.items():
        if written is None:
            continue
        short = key == "workspace" and isinstance(written, str | os.PathLike)
        value = {"path": written} if short else written
        had = result.get(key)
        if isinstance(value, Mapping):
            result[key] = overlay_tables(had if isinstance(had, Mapping) else {}, value, grow=grow)
        elif grow and isinstance(value, list | tuple) and isinstance(had, list | tuple):
            result[key] = [*had, *value]
        else:
            result[key] = value
    return result
