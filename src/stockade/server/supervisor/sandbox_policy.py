"""The policy of a sandbox: its limits, its network and its variables, below the server's ceiling."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from stockade.controls import Control
from stockade.images.names import HOST
from stockade.images.store import find
from stockade.policy import Policy
from stockade.server.config import ServerConfig
from stockade.server.record import ServerRecord
from stockade.server.supervisor.own_port import own_port_denials
from stockade.server.wire.errors import INVALID_REQUEST, ApiError
from stockade.server.wire.lifecycle import ENTRYPOINT
from stockade.server.wire.network import PLACEHOLDER, net_of
from stockade.server.wire.request_policy import with_clauses

#: The file inside to which clients append variables for later commands, unless their request names another.
ENVS_FILE = "/tmp/.execd_envs"

#: Processes and threads of a sandbox, and of each of its sessions, where the machine counts them: enough for
#: a build on many processors, unlike the default for one command.
MOST_TASKS = 1024
#: The program with which images of the code interpreter start its service.
CODE_SERVICE = "code-interpreter.sh"


def environment_of(record: ServerRecord) -> dict[str, str]:
    """Return the variables of every program of a sandbox."""
    return {"EXECD_ENVS": ENVS_FILE, **record.env, "OPENSANDBOX_ID": record.id}


def policy_of(record: ServerRecord, config: ServerConfig) -> Policy:
    """Return the policy of a sandbox; refused if it goes beyond the ceiling."""
    # What a request leaves open is as wide as the ceiling.
    most: dict[str, Any] = config.ceiling.get("limits", {})
    policy = Policy(
        env=environment_of(record),
        limits={"tasks": MOST_TASKS, **most, **record.limits},
        net=guarded(config.network if record.network is None else net_of(record.network), config),
        syscalls={"deny": list(config.deny_syscalls)},
        backend="native",
        accept=(*config.accept, *(() if "tasks" in most else (Control.LIMITS_TASKS,))),
    )
    policy = with_clauses(policy, record.policy)
    refuse_beyond_ceiling(policy, config)
    return policy


def guarded(net: str | tuple[str, ...], config: ServerConfig) -> str | tuple[str, ...]:
    """Add to network rules those that keep a sandbox from the server's own port; no network stays none."""
    return net if isinstance(net, str) or not net else (*net, *own_port_denials(config))


def refuse_beyond_ceiling(policy: Policy, config: ServerConfig) -> None:
    """Refuse a policy that the server's configuration does not allow."""
    ceiling = config.ceiling_policy()
    if ceiling is None:
        return
    if ceiling.limits.tasks is None:
        limits = msgspec.structs.replace(ceiling.limits, tasks=policy.limits.tasks)
        ceiling = msgspec.structs.replace(ceiling, limits=limits)
    # The variables are the client's own, and those of the contract; what is accepted is the operator's.
    net = policy.net if isinstance(policy.net, str) else tuple(t for t in policy.net if t != PLACEHOLDER)
    if beyond := msgspec.structs.replace(policy, env={}, accept=(), net=net).excess(ceiling):
        words = f"the server's ceiling does not allow {'; '.join(beyond)}"
        raise ApiError(400, INVALID_REQUEST, words)


def is_placeholder(entrypoint: tuple[str, ...]) -> bool:
    """Whether an entrypoint only keeps a container alive, or starts the code service, which always runs."""
    return entrypoint in ((), ENTRYPOINT) or os.path.basename(entrypoint[0]) == CODE_SERVICE


def root_directory(name: str, home: str) -> str:
    """Return the directory of a registered image; empty for the host's system."""
    return "" if name == HOST else find(name, home).root
