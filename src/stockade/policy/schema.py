"""The JSON Schema of a policy file, for editors and for programs that write policies.

It is made from the model. Only values that a file may write in another form
than the model keeps ("30s", "10M", a workspace as a path) are described by
hand. The descriptions of clauses come from `descriptions`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.policy.descriptions import description
from stockade.policy.model import Policy
from stockade.policy.net_rules import MOST_RULES
from stockade.policy.values import TIME_UNITS, TIME_WORDS

_COUNT = {"type": "integer", "minimum": 1}
_TIMES = "|".join(sorted(filter(None, {*TIME_UNITS, *TIME_WORDS})))
_TIME = {
    "anyOf": [
        {"type": "number", "minimum": 0.001},
        {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)? *({_TIMES})?$"},
    ]
}
_SIZE = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+ *([KMGkmg]([Ii]?[Bb])?|[Bb])?$"}]}
_SECRET_FORM = {"type": "string", "pattern": "^(bearer|basic|body|header:.+|query:.+)$"}
_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("Policy", "workspace"): {
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/WorkspaceRule"}]
    },
    ("Policy", "net"): {
        "anyOf": [
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_RULES},
            {"enum": ["none", "open"]},
        ],
        "default": [],
    },
    ("Policy", "exec"): {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ("Policy", "toolchain"): {
        "anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
        "default": True,
    },
    ("Policy", "reuse"): {"$ref": "#/$defs/Reuse"},
    ("Secret", "from_env"): {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_]*\??$"},
    ("Secret", "from_file"): {"type": "string", "minLength": 1},
    ("Secret", "from_command"): {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ("Secret", "hosts"): {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ("Secret", "as"): {
        "anyOf": [_SECRET_FORM, {"type": "array", "items": _SECRET_FORM, "minItems": 1}],
        "default": ["bearer", "basic"],
    },
    ("Reuse", "requests"): {"type": "integer", "minimum": 1, "default": 100},
    ("Reuse", "age"): {**_TIME, "default": 600},
    ("Reuse", "idle"): {**_TIME, "default": 60},
    ("Limits", "tasks"): _COUNT,
    ("Limits", "files"): _COUNT,
    ("Limits", "cpu"): {"type": "number", "minimum": 0.01, "maximum": 1024},
    ("Limits", "cpu_time"): _TIME,
    ("Limits", "wall"): _TIME,
    ("Limits", "memory"): _SIZE,
    ("Limits", "output"): _SIZE,
    ("Limits", "disk"): _SIZE,
}
#: The models, and the prefix of their clauses' names.
_PREFIXES = {
    "Policy": "",
    "WorkspaceRule": "workspace.",
    "Limits": "limits.",
    "Syscalls": "syscalls.",
    "Reuse": "reuse.",
    "Secret": "secrets.NAME.",
}


def schema() -> dict[str, Any]:
    """Build the schema, in the 2020-12 dialect."""
    generated = msgspec.json.schema(Policy)
    models = generated["$defs"]
    for (model, name), form in _FORMS.items():
        models[model]["properties"][name] = form
    for name in ("limits", "syscalls"):  # their defaults are those of their own keys
        models["Policy"]["properties"][name].pop("default")
    for model, prefix in _PREFIXES.items():
        clauses = models[model]["properties"]
        for name, form in clauses.items():
            clauses[name] = {"description": description(prefix + name), **form}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Stockade policy",
        **generated,
    }
