"""Where the attacks on the network rules run: inside with rules, and outside, in the same small internet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from attacks import arena
from support.network import Internet
from support.warm_supervisor import WarmSupervisor


class Inside(NamedTuple):
    """What an attack found inside, and what its result says."""

    verdict: Any
    result: dict[str, Any]

    def decisions(self, kind: str = "connect", **about: Any) -> list[dict[str, Any]]:
        """The decisions of one kind with these values."""
        return [
            one
            for one in self.result["network"]
            if one["kind"] == kind and all(one[name] == value for name, value in about.items())
        ]


class Reach(NamedTuple):
    """One small internet, and the supervisor in it."""

    internet: Internet
    supervisor: WarmSupervisor

    def inside(self, attack: str, *arguments: object, net: Sequence[str] | str, **policy: Any) -> Inside:
        """Forget what arrived; run an attack of `programs/` in a sandbox with these rules."""
        self.internet.clear()
        command, shown = arena.command_of(attack, *map(_word, arguments))
        result = self.supervisor.run(command, net, **({"read": shown} if shown else {}), **policy)
        assert result["ended"][:2] == ["exited", 0], (result["ended"], result["stderr"])
        return Inside(arena.verdict_of(result["stdout"].encode()), result)

    def outside(self, attack: str, *arguments: object) -> Any:
        """Forget what arrived; run the same attack as an ordinary process of this internet."""
        self.internet.clear()
        command, _ = arena.command_of(attack, *map(_word, arguments))
        done = self.internet.outside(command)
        assert done.returncode == 0, done.stderr
        return arena.verdict_of(done.stdout.encode())


def _word(argument: object) -> object:
    return argument if isinstance(argument, str) else json.dumps(argument)
