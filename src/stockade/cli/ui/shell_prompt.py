"""The prompt of `stockade shell`: it shows that the user is inside, and in which directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stockade.policy import Policy

#: A prompt by shell. Every shell of the POSIX family expands a parameter, and only some know escapes.
PROMPTS = {"bash": r"[stockade] \w\$ ", "zsh": "[stockade] %~%# "}
USUAL = "[stockade] $PWD$ "
AS_ROOT = "[stockade] $PWD# "
#: How many names of the directory bash shows.
NAMES = "3"
#: fish takes no prompt from the environment.
FISH = "function fish_prompt; printf '[stockade] %s> ' (prompt_pwd); end"
OTHERS = ("fish", "csh", "tcsh", "nu", "elvish", "xonsh", "pwsh")


def environment(command: Sequence[str], policy: Policy) -> dict[str, str]:
    """Return the variables that give the shell its prompt; none if the policy sets or passes PS1."""
    name = os.path.basename(command[0])
    if name in OTHERS or "PS1" in policy.env or "PS1" in policy.pass_env:
        return {}
    usual = AS_ROOT if os.geteuid() == 0 else USUAL
    found = {"PROMPT_DIRTRIM": NAMES} if name == "bash" and "PROMPT_DIRTRIM" not in policy.env else {}
    return {"PS1": PROMPTS.get(name, usual), **found}


def with_prompt(command: list[str]) -> list[str]:
    """Return the shell's command; that of fish defines its prompt."""
    return [*command, "-C", FISH] if os.path.basename(command[0]) == "fish" else command
