"""Which rules a living sandbox may get: within the ceiling, and fit for its limits and its secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stockade.linux.user import Caller
from stockade.resolve.config_files import config_dir, find_layers

if TYPE_CHECKING:
    from stockade.runs.prepare import RunPreparation


def check_of(
    prepared: RunPreparation, asked: frozenset[str] = frozenset()
) -> Callable[[tuple[str, ...]], object]:
    """Return what raises PolicyError for rules that the sandbox may not get.

    `asked` are rules that the user has allowed when asked: a ceiling with `ask` allows those.
    """

    def check(rules: tuple[str, ...]) -> None:
        from stockade.policy.network_clauses import refuse_unseen_requests

        refuse_unseen_requests(prepared.resolved.limits, rules)
        if secrets := prepared.resolved.policy.secrets:
            from stockade.policy.secrets import refuse_unjudged

            refuse_unjudged(secrets, rules)
        refuse_above_ceiling(rules, asked)

    return check


def refuse_above_ceiling(rules: tuple[str, ...], asked: frozenset[str] = frozenset()) -> None:
    """Refuse rules that allow more than the ceiling of the user's layers, as it is now."""
    caller = Caller.current()
    place = find_layers(config_dir(caller.environ, caller.home))
    if place is not None:
        from stockade.resolve.agent_layers import Layers

        Layers.load(place).refuse_net(rules, asked)
