"""The JSON Schema of a policy file, for editors and for whoever writes policies by program.

Made from the model; only the values that may be written in another form than
they are kept in ("30s", "10M", a workspace as a path) are described by hand.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.policy.model import Policy

_COUNT = {"type": "integer", "minimum": 1}
_TIME = {
    "anyOf": [
        {"type": "number", "minimum": 0.001},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)?$"},
    ]
}
_TIME_WORDS = 'seconds, or "250ms", "30s", "5m", "1h"'
_SIZE = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+[KMG]?$"}]}
_SIZE_WORDS = 'bytes, or "64K", "10M", "1G"'
_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("Policy", "workspace"): {
        "description": "a directory, or a table with its mode",
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/WorkspaceRule"}],
    },
    ("Policy", "net"): {
        "description": '[] for no network, "open" for the host\'s',
        "anyOf": [{"type": "array", "maxItems": 0}, {"const": "open"}],
        "default": [],
    },
    ("Policy", "exec"): {
        "description": "the only files that may be executed; * ? and ** stand for names",
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
    },
    ("Policy", "toolchain"): {
        "description": "whether the command's install is shown; or further commands whose installs are",
        "anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
        "default": True,
    },
    ("Limits", "tasks"): {"description": "processes and threads at once", **_COUNT},
    ("Limits", "files"): {"description": "open descriptors of one process", **_COUNT},
    ("Limits", "cpu"): {"description": "cores", "type": "number", "minimum": 0.01, "maximum": 1024},
    ("Limits", "cpu_time"): {"description": f"of all processes together: {_TIME_WORDS}", **_TIME},
    ("Limits", "wall"): {"description": _TIME_WORDS, **_TIME},
    ("Limits", "memory"): {"description": f"of all processes together: {_SIZE_WORDS}", **_SIZE},
    ("Limits", "output"): {"description": _SIZE_WORDS, **_SIZE},
    ("Limits", "disk"): {"description": f"of the changes and private memory: {_SIZE_WORDS}", **_SIZE},
}


def schema() -> dict[str, Any]:
    """The schema, in the 2020-12 dialect."""
    made = msgspec.json.schema(Policy)
    models = made["$defs"]
    for (model, name), form in _FORMS.items():
        models[model]["properties"][name] = form
    for name in ("limits", "syscalls"):  # their defaults are those of their own keys
        models["Policy"]["properties"][name].pop("default")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Stockade policy",
        **made,
    }
