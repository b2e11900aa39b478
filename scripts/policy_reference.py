"""Writes the tables of the policy pages in docs/reference from the model, so that page and code agree.

The docstrings of the model get the words of each clause from the same place, for `help(stockade.Policy)`.

python scripts/policy_reference.py           write it
python scripts/policy_reference.py --check   exit code 1 if it is stale
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from stockade.backends.backend import Mechanism
from stockade.backends.native import Native
from stockade.controls import Control
from stockade.policy import Limits, Policy, Reuse
from stockade.policy.compare import RULES
from stockade.policy.compare import clauses as names
from stockade.policy.descriptions import CLAUSES, CONTROLS
from stockade.policy.model import LATER_BACKENDS, TABLES, WEAKER_BY_DEFAULT, Secret, limit_text
from stockade.policy.profile import profile
from stockade.policy.values import time_text
from stockade.runs.evidence import OBSERVED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "reference"
MODEL = ROOT / "src" / "stockade" / "policy" / "model.py"
ATTRIBUTES = re.compile(r'(class (\w+)\(_Clauses, .*?\n    Attributes:\n).*?(    """\n)', re.DOTALL)
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of what is generated -->)", re.DOTALL)


def clauses() -> Iterator[str]:
    """Every clause with its form, its default and its control."""
    yield "| clause | value | default | says | control |"
    yield "|---|---|---|---|---|"
    for name, model, field in _fields():
        known = CLAUSES[name]
        if name in ("limits", "syscalls"):
            continue  # their keys have rows of their own
        control = f"`{known.control}`" if known.control else ""
        value, default = _form(name, model, field), _default(name, model, field)
        yield f"| `{name}` | {value} | {default} | {known.says} | {control} |"
    yield ""
    backends = ", ".join(f"`{name}`" for name in LATER_BACKENDS)
    yield f"This version knows and refuses the backends {backends}, because it cannot enforce them."


def controls() -> Iterator[str]:
    """Every control: what it promises, by which means, how that is seen, and whether it may be weaker."""
    yield "| control | promises | by | seen | where the host cannot |"
    yield "|---|---|---|---|---|"
    for control in Control:
        way = Native.mechanisms[control]
        without = _without(control, way)
        yield f"| `{control}` | {CONTROLS[control]} | {_ways(way)} | {OBSERVED[control]} | {without} |"


def rules() -> Iterator[str]:
    """What "no more than another policy" means, clause by clause."""
    yield "| clause | no more than the other |"
    yield "|---|---|"
    for name in names():
        yield f"| `{name}` | {RULES[name]} |"


def _fields() -> Iterator[tuple[str, type[msgspec.Struct], str]]:
    whole: type[msgspec.Struct] = Policy
    for name in whole.__struct_fields__:
        yield name, whole, name
        if model := TABLES.get(name):
            for inner in model.__struct_fields__:
                yield f"{name}.{inner}", model, inner
        if name == "secrets":
            for shown, inner in zip(Secret.__struct_encode_fields__, Secret.__struct_fields__, strict=True):
                yield f"{name}.NAME.{shown}", Secret, inner


def _form(name: str, model: type[msgspec.Struct], field: str) -> str:
    words = _literals(get_type_hints(model)[field])
    form = CLAUSES[name].form
    return form or ", ".join(f'`"{word}"`' for word in words)


def _literals(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _default(name: str, model: type[msgspec.Struct], field: str) -> str:
    value = next(one.default for one in msgspec.structs.fields(model) if one.name == field)
    value = getattr(Policy(), field) if model is Policy else value
    if model is Limits:
        value = getattr(profile("strict").limits, field)
        return "none" if value is None else f"`{limit_text(field, value)}`"
    if name == "workspace":
        return "none; `stockade run`: the current directory"
    if value is None:
        return "none"
    if model is Reuse:
        return f"`{value}`" if field == "requests" else f'`"{time_text(value)}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if value and isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return "`{}`" if field == "env" else "`[]`"


def _ways(way: Mechanism) -> str:
    # Words that depend on the machine are functions; their names say what they are made of.
    words = way.words if isinstance(way.words, str) else BY_HOST[way.words.__name__]
    return f"{words}; for root: {_ways(way.otherwise)}" if way.otherwise else words


#: What `native_offers` says on a machine of today.
BY_HOST = {"_files": "mount namespace, pivot_root, Landlock", "_ipc": "ipc namespace, Landlock scopes"}


def _without(control: Control, way: Mechanism) -> str:
    if not way.optional:
        return "refused"
    kept = "is weaker" if way.weaker else "is not kept"
    by_default = f"the profile's limit {kept}, and the result says so; a limit that you write is refused"
    refused = by_default if control in WEAKER_BY_DEFAULT else "refused"
    instead = f" ({way.weaker})" if way.weaker else ""
    return f'{refused}, unless `accept = ["{control}"]`{instead}'


def attributes(name: str) -> str:
    """The docstring's list of a class's clauses."""
    owned = [one for one in _fields() if one[1].__name__ == name]
    lines = []
    for clause, model, field in owned:
        says = CLAUSES[clause].says
        text = f"{field}: {says[0].upper()}{says[1:]} ({_form(clause, model, field)})."
        lines += textwrap.wrap(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n"


def docstrings(source: str) -> str:
    """The model with the lists of clauses in its docstrings made anew."""
    made, count = ATTRIBUTES.subn(lambda part: part[1] + attributes(part[2]) + part[3], source)
    if count != len(TABLES) + 2:
        raise SystemExit(f"{MODEL.name} has {count} lists of clauses instead of {len(TABLES) + 2}")
    return made


#: By page, what makes its generated parts.
PAGES = {
    "policy.md": {"clauses": clauses},
    "controls.md": {"controls": controls},
    "within.md": {"rules": rules},
}


def page(name: str, text: str) -> str:
    """The page with its generated parts made anew."""
    makers = PAGES[name]
    made, count = PART.subn(lambda part: part[1] + "\n".join(makers[part[2]]()) + "\n" + part[3], text)
    if count != len(makers):
        raise SystemExit(f"{name} has {count} generated parts instead of {len(makers)}")
    return made


def main(arguments: list[str]) -> int:
    """Write the pages, or say which are stale."""
    stale = 0
    for path in (*(DOCS / name for name in PAGES), MODEL):
        text = path.read_text(encoding="utf-8")
        made = docstrings(text) if path == MODEL else page(path.name, text)
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
        elif made != text:
            print(f"{path.name} is stale: run `python scripts/policy_reference.py`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
