"""The policy of an agent, found through the registry.

If the agent's row names a policy file, that file applies, with the content
that it had when it was added, within the layers' ceiling. Otherwise the layers
decide by the agent's name or category; without layers, the user's own policy
applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stockade.agents.registry import Agent
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.resolve import config_files
from stockade.resolve.config_files import config_dir
from stockade.resolve.discovery import PolicySource, discover


def agreed(agent: Agent | None, name: str, category: str) -> str:
    """Return the category of an agent; refuse one that contradicts the registry."""
    if agent is None or category in ("", agent.category):
        return category if agent is None else agent.category
    raise PolicyError(
        f"the agent {name!r} is in the registry with the category {agent.category!r}, not {category!r}",
        hint=f"to change it: stockade agents add {name} --category {category}",
    )


def policy_for(
    agent: Agent,
    caller: Caller,
    *,
    flags: Mapping[str, Any] | None = None,
    workspace: str | None = None,
) -> PolicySource:
    """Return the policy under which the agent runs."""
    layered = (
        not agent.policy and config_files.find_layers(config_dir(caller.environ, caller.home)) is not None
    )
    return discover(
        caller.cwd,
        caller.environ,
        caller.home,
        flags=flags,
        file=agent.policy or None,
        hash=agent.hash,
        workspace=workspace,
        agent=agent.name if layered else "",
        category=agent.category if layered else "",
    )
