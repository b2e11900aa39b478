"""Which variables of a sandbox reach an isolated session."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from stockade.server.isolated.session_request import EnvPassthrough

#: Names that never reach a session, whatever the request says; upper and lower case count as the same.
SECRETS = (
    "*_API_KEY",
    "*_TOKEN",
    "*_SECRET",
    "*_PASSWORD",
    "AWS_*",
    "ALI_*",
    "ALIYUN_*",
    "K8S_*",
    "KUBE_*",
)


def is_secret(name: str) -> bool:
    """Return whether a variable's name looks like that of a secret."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in SECRETS)


def passed_variables(variables: Mapping[str, str], rule: EnvPassthrough) -> dict[str, str]:
    """Return the sandbox's variables that reach a session: never a secret, else as the request says."""
    wanted = rule.mode == "allow"
    return {
        name: value
        for name, value in variables.items()
        if not is_secret(name) and (name in rule.keys) is wanted
    }
