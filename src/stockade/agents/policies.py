"""The policy of an agent: the registry says where it is written.

With a policy file there, that file counts, as it was when the agent was given
it, within the layers' ceiling. Without one, what the layers give the agent or
its category; and where there are no layers, the user's own policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stockade.agents.registry import Agent
from stockade.errors import PolicyError
from stockade.policy import Caller, layers
from stockade.policy.load import Discovered, config_dir, discover


def agreed(agent: Agent | None, name: str, category: str) -> str:
    """The category of an agent, where the registry and whoever names it do not contradict each other."""
    if agent is None or category in ("", agent.category):
        return category if agent is None else agent.category
    raise PolicyError(
        f"the agent {name!r} is in the registry with the category {agent.category!r}, not {category!r}",
        hint=f"if that is meant: stockade agents add {name} --category {category}",
    )


def policy_for(
    agent: Agent,
    caller: Caller,
    *,
    flags: Mapping[str, Any] | None = None,
    workspace: str | None = None,
) -> Discovered:
    """The policy under which the agent runs."""
    layered = not agent.policy and layers.find(config_dir(caller.environ, caller.home)) is not None
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
