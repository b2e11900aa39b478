"""Pipelines as TOML files: `docs/reference/pipeline-files.md` describes the keys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.plain_text import clean_line
from stockade.pipeline.pipeline import Gather, Pipeline, valid_source
from stockade.pipeline.stage import Stage, StageOptions
from stockade.policy import Policy
from stockade.policy.suggestions import closest
from stockade.policy.toml import anchored, check_clauses, decode, directory_of, load, read_file, text_of

WHOLE = ("name", "timeout", "pipefail", "stage", "source", "consumer")
STAGE = ("command", "policy", "env", "cwd", "grace", "on_exit", "stdin")
FORM = """write a table for each stage:

[[stage]]
command = ["curl", "-sS", "https://api.example.com/data"]
policy = { net = ["api.example.com"] }

[[stage]]
command = ["python3", "parse.py"]
policy = "parse.toml\""""


class PipelineFile(msgspec.Struct, frozen=True):
    """What a file describes."""

    stages: Pipeline | Gather
    timeout: float | str | None


def load_pipeline(path: str) -> PipelineFile:
    """Read a pipeline from a file; its paths are relative to the file's directory."""
    return parse_pipeline(text_of(read_file(path), path), path, directory_of(path))


def parse_pipeline(text: str, name: str, base: str) -> PipelineFile:
    """Read a pipeline from TOML; `name` is the file's, and `base` its directory."""
    table = decode(text, name)
    _known(table, WHOLE, name)
    timeout = table.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float | str)):
        raise PolicyError(f"{name}: timeout is not a time", hint='write timeout = "5m"')
    own, pipefail = table.get("name", ""), table.get("pipefail", False)
    if not isinstance(own, str):
        raise PolicyError(f"{name}: name is not text", hint='write name = "report"')
    if not isinstance(pipefail, bool):
        raise PolicyError(f"{name}: pipefail is neither true nor false", hint="write pipefail = true")
    gathers = "source" in table or "consumer" in table
    if gathers == ("stage" in table):
        raise PolicyError(f"{name} has neither stages nor sources, or both", hint=FORM)
    try:
        if not gathers:
            return PipelineFile(
                Pipeline(_stages(table["stage"], "stage", name, base), name=own, pipefail=pipefail), timeout
            )
        sources = table.get("source")
        if not isinstance(sources, dict) or "consumer" not in table:
            raise PolicyError("sources need a consumer", hint="write [source.data] and [consumer]")
        made = {
            valid_source(source): _source(given, f"source.{source}", name, base)
            for source, given in sources.items()
        }
        into = _stage(table["consumer"], "consumer", name, base)
        return PipelineFile(Gather(made, into=into, name=own, pipefail=pipefail), timeout)
    except PolicyError as error:
        if error.message.startswith(f"{name}:"):
            raise
        raise PolicyError(f"{name}: {error.message}", hint=error.hint) from None


def _source(table: Any, where: str, name: str, base: str) -> Stage | Pipeline:
    """Return the stage of a source, or its pipeline."""
    if isinstance(table, dict) and "stage" in table:
        _known(table, ("stage",), f"{name}: {where}")
        return Pipeline(_stages(table["stage"], f"{where}.stage", name, base))
    return _stage(table, where, name, base)


def _stages(tables: Any, where: str, name: str, base: str) -> list[Stage]:
    if not isinstance(tables, list):
        raise PolicyError(f"{name}: {where} is not a list of tables", hint=FORM)
    return [_stage(table, f"{where} {number}", name, base) for number, table in enumerate(tables)]


def _stage(table: Any, where: str, name: str, base: str) -> Stage:
    where = f"{name}: {clean_line(where)}"
    if not isinstance(table, dict):
        raise PolicyError(f"{where} is not a table", hint=FORM)
    _known(table, STAGE, where)
    command = table.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise PolicyError(f"{where}: command is not a list of words", hint='write command = ["sort", "-u"]')
    options: StageOptions = {}
    for key in ("env", "cwd", "grace", "on_exit"):
        if key in table:
            options[key] = table[key]
    if "stdin" in table:
        options["stdin"] = _opened(table["stdin"], where, base)
    try:
        return Stage(_policy(table.get("policy", {}), base), command, **options)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.message}", hint=error.hint) from None


def _policy(given: Any, base: str) -> Policy:
    """Return the policy of a stage: a table of clauses, or the path of a policy file."""
    if isinstance(given, str):
        return load(os.path.join(base, given))
    if not isinstance(given, dict):
        raise PolicyError("policy is neither a table nor the path of a file")
    return Policy(**anchored(check_clauses(given, base), base))


def _opened(path: Any, where: str, base: str) -> int:
    """Open the file that a stage reads. The process that runs the pipeline keeps it open until it ends."""
    if not isinstance(path, str):
        raise PolicyError(f"{where}: stdin is not a path", hint='write stdin = "data.csv"')
    try:
        return os.open(os.path.join(base, path), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{where}: cannot read {path!r:.200}: {error}") from None


def _known(table: dict[str, Any], keys: Iterable[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = closest(key, keys)
            hint = f"{f'did you mean {near}? ' if near else ''}the keys are {', '.join(keys)}"
            raise PolicyError(f"{where}: there is no key {clean_line(key)!r:.100}", hint=hint)
