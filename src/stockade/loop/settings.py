"""What a loop is asked to do: the options of `stockade loop`, which `[loop]` of a file can have as well."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.plain_text import clean_line
from stockade.loop.items.entries import MOST_ATTEMPTS
from stockade.policy.values import nearest
from stockade.runs.limits import seconds_of

#: How long an attempt may take, and its verify command, if nothing else is said.
ATTEMPT_SECONDS, VERIFY_SECONDS = 3600.0, 1800.0
MOST_PARALLEL = 64
SCOPES = ("attempt", "item", "loop")
LIMITS = ("time", "idle", "tokens", "cost")


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attempt, an item or a loop may use: seconds, seconds without output, tokens, US dollars."""

    time: float | None = None
    idle: float | None = None
    tokens: int | None = None
    cost: float | None = None


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budgets of each attempt, of each item with all its attempts, and of the loop."""

    attempt: Budget = Budget(time=ATTEMPT_SECONDS)
    item: Budget = Budget()
    loop: Budget = Budget()


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a loop is asked to do.

    `items` is where the work items come from, `agent` the agent's command, `verify` the command that judges.
    `judge` are the files that judge, besides those that test runners obey, unless `judge_defaults` is false.
    `report` is where the verify command leaves its report: "auto" for what pytest can be told to write,
    "none", "stdout", or a path in the project. With `strict` a verify command must exit with 0 even if it did
    not before the first attempt.
    """

    items: str = ""
    kind: str | None = None
    agent: tuple[str, ...] = ()
    verify: str = ""
    judge: tuple[str, ...] = ()
    judge_defaults: bool = True
    report: str = "auto"
    strict: bool = False
    attempts: int = 3
    best_of: int = 1
    score: str = ""
    parallel: int = 1
    verify_timeout: float = VERIFY_SECONDS
    git_commit: bool = False
    notify: str = ""
    budget: Budgets = Budgets()


def parse_settings(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Check what a `[loop]` table says, and return it under the names of `LoopSettings`; `name` is the file.

    >>> parse_settings({"attempts": 2, "budget": {"loop": {"time": "2h"}}}, "stockade.toml")["attempts"]
    2
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in LoopSettings.__struct_fields__:
            hint = nearest(str(key), LoopSettings.__struct_fields__, "loop.")
            raise PolicyError(f"{name}: loop.{clean_line(str(key))}: there is no such key", hint=hint)
        if key == "budget":
            found[key] = _budgets(value, name)
        elif key == "verify_timeout":
            found[key] = seconds_of(value)
        elif key in ("agent", "judge") and isinstance(value, str):
            raise PolicyError(f"{name}: loop.{key} is a list", hint=f'write {key} = ["{clean_line(value)}"]')
        else:
            found[key] = value
    make_settings(found, name)
    return found


def _budgets(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or any(not isinstance(part, dict) for part in value.values()):
        raise PolicyError(
            f"{name}: loop.budget must have tables", hint='write [loop.budget.attempt] and time = "30m" below'
        )
    return {
        scope: {limit: _limit(limit, one) for limit, one in part.items()} for scope, part in value.items()
    }


def _limit(limit: str, value: Any) -> Any:
    return seconds_of(value) if limit in ("time", "idle") else value


def parse_budgets(words: list[str]) -> dict[str, dict[str, Any]]:
    """Return the budgets that `--budget SCOPE.LIMIT=VALUE` asks for.

    >>> parse_budgets(["attempt.time=30m", "loop.cost=20"])
    {'attempt': {'time': 1800.0}, 'loop': {'cost': 20.0}}
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        scope, _, limit = name.partition(".")
        if not equals or scope not in SCOPES or limit not in LIMITS:
            raise PolicyError(
                f"--budget {clean_line(word)}: is not a budget",
                hint="write attempt, item or loop, a dot, time, idle, tokens or cost, and a value: "
                "--budget attempt.time=30m --budget loop.cost=20",
            )
        try:
            number = _limit(limit, value) if limit in ("time", "idle") else float(value)
        except ValueError:
            raise PolicyError(
                f"--budget {clean_line(word)}: {clean_line(value)!r} is not a number",
                hint=f"write --budget {name}=20",
            ) from None
        except PolicyError as error:
            problem = error.message.rpartition(": ")[2]
            raise PolicyError(f"--budget {clean_line(word)}: {problem}", hint=error.hint) from None
        found.setdefault(scope, {})[limit] = int(number) if limit == "tokens" else number
    return found


def make_settings(found: Mapping[str, Any], name: str) -> LoopSettings:
    """Return checked settings; `name` says in errors where they come from."""
    try:
        made = msgspec.convert(dict(found), LoopSettings)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{name}: {error}", hint="docs/how-to/loop.md lists the keys of [loop]") from None
    for key, most in (("attempts", MOST_ATTEMPTS), ("best_of", MOST_PARALLEL), ("parallel", MOST_PARALLEL)):
        if not 1 <= getattr(made, key) <= most:
            raise PolicyError(f"{name}: {key} = {getattr(made, key)}", hint=f"write 1 to {most}")
    if made.score and made.best_of == 1:
        raise PolicyError(
            f"{name}: score chooses between passed attempts, and there is only one at a time",
            hint="write --best-of N too, or leave --score out",
        )
    for path in made.judge:
        check_judge_path(path, name)
    if made.report not in ("auto", "none", "stdout"):
        check_judge_path(made.report, name)
    return made


def check_judge_path(path: str, name: str) -> None:
    """Refuse a path of the judge's that does not lie in the project."""
    inside = os.path.normpath(path)
    if not path or path.startswith("/") or inside == "." or inside.split("/")[0] == "..":
        raise PolicyError(
            f"{name}: {clean_line(path)!r} is not a path in the project",
            hint="name a file or a directory relative to the project, such as tests",
        )
