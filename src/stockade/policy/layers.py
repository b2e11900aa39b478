"""Layers: what holds for everyone, for a category of agents and for one agent, decided in one place.

Each layer writes clauses, as a policy does; what a more specific layer writes
wins, field by field. Only a list that another layer has begun cannot just be
written again: it says whether it extends or replaces what was there, because
either reading would be somebody's surprise.

    [global]
    read = ["/opt/data"]
    limits = { wall = "5m", memory = "1G" }

    [category.reviewers]
    read = { extend = ["/opt/rules"] }

    [agent.linter]
    category = "reviewers"
    limits = { wall = "30s" }

    [ceiling]
    profile = "dev"
    read = ["/opt"]

In place of one file there may be a directory with `global.toml`,
`ceiling.toml`, `category/NAME.toml` and `agent/NAME.toml`. A policy that
comes out must be within the ceiling, if there is one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.load import read_file, real_names, text_of
from stockade.policy.model import Policy
from stockade.policy.text import anchored, decode, line_of, located, written
from stockade.policy.values import Invalid, nearest

NAME = "policies"
GLOBAL, CEILING, CATEGORY, AGENT = "global", "ceiling", "category", "agent"
KINDS = (GLOBAL, CATEGORY, AGENT, CEILING)
EXTEND, REPLACE = "extend", "replace"


class Layer(msgspec.Struct, frozen=True):
    """What one of them writes: whole clauses, and lists that go on with those of the layers below."""

    name: str
    source: str
    clauses: dict[str, Any]
    #: By the dotted name of the field.
    extended: dict[str, list[str]]
    #: Lists that say that they replace.
    replaced: frozenset[str]
    #: The category that an agent names.
    category: str = ""


class Resolution(msgspec.Struct, frozen=True):
    """The policy for one agent, and for each field that a layer wrote which one that was."""

    policy: Policy
    #: By the dotted name of the field; the layers whose lists were put together are all named.
    origins: dict[str, tuple[str, ...]]
    layers: tuple[Layer, ...]


class Layers(msgspec.Struct, frozen=True):
    """Every layer there is."""

    source: str
    everyone: Layer | None
    categories: dict[str, Layer]
    agents: dict[str, Layer]
    ceiling: Policy | None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layers:
        """The layers in a file or in a directory of files; relative paths count from the file they are in."""
        place = os.fsdecode(path)
        try:
            is_directory = stat.S_ISDIR(os.stat(place).st_mode)
        except OSError as error:
            raise PolicyError(f"cannot read {place}: {error.strerror}") from error
        found = _from_directory(place) if is_directory else _from_file(place)
        categories = {
            layer.name.partition(" ")[2]: layer for layer in found if layer.name.startswith(CATEGORY)
        }
        for layer in found:
            if layer.category and layer.category not in categories:
                raise PolicyError(
                    f"{layer.source}: {layer.name} is of the category {layer.category!r}, which there is not",
                    hint=_hint(layer.category, categories, f"write [{CATEGORY}.{layer.category}]"),
                )
        top = next((layer for layer in found if layer.name == CEILING), None)
        return cls(
            source=place,
            everyone=next((layer for layer in found if layer.name == GLOBAL), None),
            categories=categories,
            agents={layer.name.partition(" ")[2]: layer for layer in found if layer.name.startswith(AGENT)},
            ceiling=None if top is None else _policy(top.clauses, top),
        )

    def resolve(self, agent: str, category: str = "") -> Resolution:
        """The policy for an agent. One that has no layer is known by its category, or not at all."""
        own = self.agents.get(agent)
        chosen = category or (own.category if own is not None else "")
        if own is None and not category:
            raise PolicyError(
                f"{self.source} has no agent {agent!r}",
                hint=_hint(agent, self.agents, f"write [{AGENT}.{agent}], or name a category"),
            )
        if own is not None and category and own.category not in ("", category):
            raise PolicyError(
                f"the agent {agent!r} is of the category {own.category!r}, not {category!r}",
                hint=f"its category is written in {own.source}",
            )
        if chosen and chosen not in self.categories:
            raise PolicyError(
                f"{self.source} has no category {chosen!r}",
                hint=_hint(chosen, self.categories, f"write [{CATEGORY}.{chosen}]"),
            )
        between = self.categories.get(chosen)
        return _laid(tuple(layer for layer in (self.everyone, between, own) if layer is not None))

    def bounded(self, policy: Policy, home: str, cwd: str, environ: Mapping[str, str]) -> Policy:
        """The policy by real names, with what the ceiling hides; PolicyError if it exceeds the ceiling."""
        if self.ceiling is None:
            return policy
        asked, most = (real_names(one, home, cwd, environ) for one in (policy, self.ceiling))
        # Also from what is shown besides the policy's own clauses: by its profile, or as a toolchain.
        hidden = tuple(path for path in most.deny if path not in asked.deny)
        asked = msgspec.structs.replace(asked, deny=(*asked.deny, *hidden))
        beyond = asked.excess(most)
        if beyond:
            raise PolicyError(
                f"the policy exceeds the ceiling in {self.source}:\n" + "\n".join(beyond),
                hint="ask for less, or let whoever decides raise the ceiling",
            )
        return asked


def find(config: str) -> str | None:
    """The layers in the user's own directory: a file or a directory, not both."""
    file, directory = f"{config}/{NAME}.toml", f"{config}/{NAME}"
    has = [path for path in (file, directory) if _is_there(path)]
    if len(has) > 1:
        raise PolicyError(f"there are both {file} and {directory}", hint="keep one of them")
    return has[0] if has else None


def _is_there(path: str) -> bool:
    """Whether there is something of that name. One that cannot be looked at may be a ceiling."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise PolicyError(f"cannot look at {path}: {error.strerror}") from error
    return True


def _from_file(path: str) -> list[Layer]:
    text = text_of(read_file(path), path)
    base = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    found = []
    for kind, value in decode(text, path).items():
        where = _where(path, text, (kind,))
        if kind not in KINDS:
            raise PolicyError(f"{where}there is no layer {kind!r}", hint=nearest(kind, KINDS))
        if not isinstance(value, dict):
            raise PolicyError(f"{where}{kind} must be a table", hint=f"write [{kind}] and clauses below it")
        if kind in (GLOBAL, CEILING):
            found.append(_layer(value, kind, path, text, base, (kind,)))
            continue
        for name, table in value.items():
            if not isinstance(table, dict):
                raise PolicyError(
                    f"{_where(path, text, (kind, name))}{kind}.{name} must be a table",
                    hint=f"layers of a {kind} have a name: [{kind}.{name}]",
                )
            found.append(_layer(table, f"{kind} {name}", path, text, base, (kind, name)))
    return found


def _from_directory(directory: str) -> list[Layer]:
    found = []
    entries = sorted(entry for entry in os.listdir(directory) if not entry.startswith("."))
    if not entries:
        raise PolicyError(f"{directory} has no layers", hint="write them, or remove the directory")
    for entry in entries:
        path = f"{directory}/{entry}"
        name = entry.removesuffix(".toml")
        if entry in (CATEGORY, AGENT):
            found += [
                _alone(f"{path}/{file}", f"{entry} {file.removesuffix('.toml')}")
                for file in sorted(os.listdir(path))
                if file.endswith(".toml")
            ]
        elif entry.endswith(".toml") and name in (GLOBAL, CEILING):
            found.append(_alone(path, name))
        else:
            raise PolicyError(
                f"{path} is no layer",
                hint=f"known: {GLOBAL}.toml, {CEILING}.toml, {CATEGORY}/NAME.toml, {AGENT}/NAME.toml",
            )
    return found


def _alone(path: str, name: str) -> Layer:
    text = text_of(read_file(path), path)
    return _layer(decode(text, path), name, path, text, os.path.realpath(os.path.dirname(path)), ())


def _layer(
    table: dict[str, Any], name: str, source: str, text: str, base: str, section: tuple[str, ...]
) -> Layer:
    """One layer, its clauses checked for themselves."""
    category = ""
    if name.startswith(AGENT) and "category" in table:
        table = dict(table)
        category = table.pop("category")
        if not isinstance(category, str) or not category:
            raise PolicyError(f"{_where(source, text, (*section, 'category'))}category must be a name")
    if isinstance(table.get("workspace"), str):
        table = {**table, "workspace": {"path": table["workspace"]}}
    plain: dict[str, Any] = {}
    ways: dict[str, str] = {}
    for field, value in _fields(table):
        where = _where(source, text, (*section, *field.split(".")))
        how = _way(field, value, where)
        if how == EXTEND and name == CEILING:
            raise PolicyError(f"{where}{field}: a ceiling has nothing to extend", hint="write a plain list")
        _put(plain, field, value[how] if how else value)
        ways[field] = how
    try:
        clauses = written(plain, base)
    except Invalid as error:
        raise located(error, text, source, section) from None
    extended = {field: _take(clauses, field) for field, how in ways.items() if how == EXTEND}
    replaced = frozenset(field for field, how in ways.items() if how == REPLACE)
    return Layer(name, source, clauses, extended, replaced, category)


def _fields(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The clauses by their dotted names; the variables of `env` count one by one."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and (key == "env" or not _is_way(value)):
            found += [(f"{key}.{part}", item) for part, item in value.items()]
        else:
            found.append((key, value))
    return found


def _is_way(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and set(value) <= {EXTEND, REPLACE}


def _way(field: str, value: object, where: str) -> str:
    """Whether a value says that it extends or replaces."""
    if not isinstance(value, dict) or not _is_way(value):
        return ""
    if len(value) > 1:
        raise PolicyError(f"{where}{field} both extends and replaces", hint="write one of them")
    (how,) = value
    if not isinstance(value[how], list):
        raise PolicyError(
            f"{where}{field}: only lists are extended or replaced",
            hint=f"write {field} = {{ {how} = [...] }}",
        )
    return str(how)


def _put(table: dict[str, Any], field: str, value: Any) -> None:
    key, _, part = field.partition(".")
    if part:
        table.setdefault(key, {})[part] = value
    else:
        table[key] = value


def _take(table: dict[str, Any], field: str) -> list[str]:
    """Take a list out of the clauses."""
    key, _, part = field.partition(".")
    if not part:
        return list(table.pop(key))
    taken = list(table[key].pop(part))
    if not table[key]:
        del table[key]
    return taken


def _laid(layers: tuple[Layer, ...]) -> Resolution:
    """The layers over one another, the most specific last."""
    table: dict[str, Any] = {}
    origins: dict[str, tuple[str, ...]] = {}
    defaults = Policy().table(full=True)
    for layer in layers:
        for field, value in _fields(layer.clauses):
            had = origins.get(field)
            if isinstance(value, list) and had and field not in layer.replaced:
                raise PolicyError(
                    f"{layer.source}: {layer.name} writes {field}, which {' and '.join(had)} writes too",
                    hint=f"say which is meant: {field} = {{ {EXTEND} = [...] }}, or {{ {REPLACE} = [...] }}",
                )
            _put(table, field, value)
            origins[field] = (layer.name,)
        for field, more in layer.extended.items():
            key, _, part = field.partition(".")
            inner = table.get(key, {}) if part else table
            default = defaults.get(key, {}) if part else defaults
            had_list = inner.get(part or key, default.get(part or key, []))
            if not isinstance(had_list, list):
                raise PolicyError(
                    f"{layer.source}: {layer.name} extends {field}, which is no list", hint="replace it"
                )
            _put(table, field, [*had_list, *(item for item in more if item not in had_list)])
            origins[field] = (*origins.get(field, ("default",) if had_list else ()), layer.name)
    last = layers[-1] if layers else None
    return Resolution(_policy(table, last), origins, layers)


def _policy(table: dict[str, Any], layer: Layer | None) -> Policy:
    try:
        return Policy(**anchored(table, None))
    except PolicyError as error:
        where = f"{layer.source}: {layer.name}: " if layer is not None else ""
        raise PolicyError(f"{where}{error.message}", hint=error.hint) from None


def _hint(word: str, known: Mapping[str, Layer], otherwise: str) -> str:
    return nearest(word, known) if known else otherwise


def _where(source: str, text: str, key: tuple[str, ...]) -> str:
    line = line_of(text, key, None)
    return f"{source}:{line}: " if line else f"{source}: "
