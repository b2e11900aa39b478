"""The `policy` of a request: clauses of a policy that a client may write for its sandbox or session.

A client is another machine's user: it may ask for less than the server gives, and for limits, but never for
a path, a program or a variable of the host. So only the clauses below can be written. Those of a sandbox must
be within the server's ceiling, those of a session within the sandbox's policy.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.policy import Policy
from stockade.server.wire.errors import INVALID_REQUEST, ApiError

#: Why a limit of the disk is refused for a whole sandbox.
NO_DISK_LIMIT = (
    "a sandbox's directories lie on the server's own file system, where no limit would hold: isolated "
    "sessions have one, `upper_max_bytes` in the server's configuration"
)


class RefusedCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Further system calls to refuse."""

    deny: tuple[str, ...] = ()


class RequestPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The clauses that a request may have, with the names that they have in policy files."""

    #: Limits as a policy writes them, such as {"tasks": 32, "memory": "1G"}.
    limits: dict[str, Any] = {}
    syscalls: RefusedCalls = RefusedCalls()


def with_clauses(policy: Policy, asked: RequestPolicy) -> Policy:
    """Return a policy with the clauses of a request."""
    wanted = Policy(limits=asked.limits, syscalls={"deny": asked.syscalls.deny})
    limits = msgspec.structs.asdict(wanted.limits)
    refused = tuple(dict.fromkeys((*policy.syscalls.deny, *wanted.syscalls.deny)))
    return msgspec.structs.replace(
        policy,
        limits=msgspec.structs.replace(
            policy.limits, **{name: value for name, value in limits.items() if value is not None}
        ),
        syscalls=msgspec.structs.replace(policy.syscalls, deny=refused),
    )


def narrowed(policy: Policy, asked: RequestPolicy) -> Policy:
    """Return a policy with the clauses of a request; refused if that allows more than the policy does."""
    found = with_clauses(policy, asked)
    if beyond := found.excess(policy):
        words = f"policy: goes beyond the policy of the sandbox: {'; '.join(beyond)}"
        raise ApiError(400, INVALID_REQUEST, words)
    return found
