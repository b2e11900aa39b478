"""Policy layers: clauses for everyone, for a category of agents and for one agent, in one place.

Each layer writes clauses, as a policy does; the more specific layer wins,
field by field. Only a list that a less specific layer writes too must say
whether it extends or replaces that one, because either default would surprise
some users.

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

Instead of one file there may be a directory with `global.toml`,
`ceiling.toml`, `category/NAME.toml` and `agent/NAME.toml`. If there is a
ceiling, the resulting policy must be within it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.model import Policy
from stockade.policy.toml import anchored, check_clauses, decode, line_of, located, read_file, text_of
from stockade.policy.values import InvalidValueError, nearest, quote_protected
from stockade.resolve.discovery import add_denied, real_names, workspace_root

GLOBAL, CEILING, CATEGORY, AGENT = "global", "ceiling", "category", "agent"
KINDS = (GLOBAL, CATEGORY, AGENT, CEILING)
EXTEND, REPLACE = "extend", "replace"


class PolicyLayer(msgspec.Struct, frozen=True):
    """One layer: its clauses, and the lists that extend those of less specific layers."""

    name: str
    source: str
    clauses: dict[str, Any]
    #: By the dotted name of the field.
    extended: dict[str, list[str]]
    #: Lists that replace those of less specific layers.
    replaced: frozenset[str]
    #: The category that an agent names.
    category: str = ""

    @property
    def denied(self) -> list[str]:
        """The paths and patterns that the layer itself denies."""
        return [*self.clauses.get("deny", ()), *self.extended.get("deny", ())]


class Resolution(msgspec.Struct, frozen=True):
    """The policy for one agent, and for each field the layers that wrote it."""

    policy: Policy
    #: By the dotted name of the field; for a list, every layer that contributed.
    origins: dict[str, tuple[str, ...]]
    layers: tuple[PolicyLayer, ...]


class Layers(msgspec.Struct, frozen=True):
    """All layers of one file or directory."""

    source: str
    everyone: PolicyLayer | None
    categories: dict[str, PolicyLayer]
    agents: dict[str, PolicyLayer]
    ceiling: Policy | None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layers:
        """Load the layers of a file or a directory of files; paths are relative to the file they are in."""
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
                    f"{layer.source}: {layer.name} names an unknown category {layer.category!r}",
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
        """Merge the layers of an agent. An agent without a layer of its own needs a `category`."""
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
                hint=f"change its category in {own.source}, or leave the category out",
            )
        if chosen and chosen not in self.categories:
            raise PolicyError(
                f"{self.source} has no category {chosen!r}",
                hint=_hint(chosen, self.categories, f"write [{CATEGORY}.{chosen}]"),
            )
        between = self.categories.get(chosen)
        return _merge_layers(tuple(layer for layer in (self.everyone, between, own) if layer is not None))

    def bounded(self, policy: Policy, home: str, cwd: str, environ: Mapping[str, str]) -> Policy:
        """Return the policy by real names, with the ceiling's `deny`; refuse one that exceeds the ceiling."""
        if self.ceiling is None:
            return policy
        asked = real_names(policy, home, cwd, environ)
        root = workspace_root(asked)
        most = real_names(self.ceiling, home, cwd, environ, root=root)
        if most.workspace is None and root:  # then its paths are relative to the policy's workspace
            names = (os.path.join(root, name) for name in most.unprotected())
            most = msgspec.structs.replace(most, unprotect=tuple(map(quote_protected, names)))
        from stockade.policy.compare import excess
        from stockade.resolve.paths import protected_search

        # The ceiling's `deny` also hides paths that the profile or a toolchain shows.
        asked = add_denied(asked, most.deny)
        beyond = excess(asked, most, home) or protected_search.beyond(asked, most, environ, home)
        if beyond:
            raise self._exceeded(beyond)
        return asked

    def refuse_net(self, rules: tuple[str, ...], asked: frozenset[str] = frozenset()) -> None:
        """Refuse network rules that allow more than the ceiling.

        A ceiling with `ask` allows rules that the user has allowed when asked.
        """
        most = () if self.ceiling is None else self.ceiling.net
        if self.ceiling is None or most == "open":
            return
        if "ask" in most:
            rules = tuple(rule for rule in rules if rule not in asked)
        from stockade.policy.net_comparison import excess

        if beyond := excess(rules, most):
            raise self._exceeded(beyond)

    def _exceeded(self, beyond: list[str]) -> PolicyError:
        return PolicyError(
            f"the policy exceeds the ceiling in {self.source}:\n" + "\n".join(beyond),
            hint="ask for less, or raise the ceiling there",
        )


def _from_file(path: str) -> list[PolicyLayer]:
    text = text_of(read_file(path), path)
    base = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    found = []
    for kind, value in decode(text, path).items():
        where = _where(path, text, (kind,))
        if kind not in KINDS:
            raise PolicyError(f"{where}there is no kind of layer {kind!r}", hint=nearest(kind, KINDS))
        if not isinstance(value, dict):
            raise PolicyError(f"{where}{kind} must be a table", hint=f"write [{kind}], and clauses below it")
        if kind in (GLOBAL, CEILING):
            found.append(_layer(value, kind, path, text, base, (kind,)))
            continue
        for name, table in value.items():
            if not isinstance(table, dict):
                raise PolicyError(
                    f"{_where(path, text, (kind, name))}{kind}.{name} must be a table",
                    hint=f"write [{kind}.{name}], and clauses below it",
                )
            found.append(_layer(table, f"{kind} {name}", path, text, base, (kind, name)))
    return found


def _from_directory(directory: str) -> list[PolicyLayer]:
    found = []
    entries = sorted(entry for entry in os.listdir(directory) if not entry.startswith("."))
    if not entries:
        raise PolicyError(f"{directory} has no layers", hint="write them, or remove the directory")
    for entry in entries:
        path = f"{directory}/{entry}"
        name = entry.removesuffix(".toml")
        if entry in (CATEGORY, AGENT):
            found += [
                _read_layer_file(f"{path}/{file}", f"{entry} {file.removesuffix('.toml')}")
                for file in sorted(os.listdir(path))
                if file.endswith(".toml")
            ]
        elif entry.endswith(".toml") and name in (GLOBAL, CEILING):
            found.append(_read_layer_file(path, name))
        else:
            raise PolicyError(
                f"{path} is not a layer",
                hint=f"known: {GLOBAL}.toml, {CEILING}.toml, {CATEGORY}/NAME.toml, {AGENT}/NAME.toml",
            )
    return found


def _read_layer_file(path: str, name: str) -> PolicyLayer:
    text = text_of(read_file(path), path)
    return _layer(decode(text, path), name, path, text, os.path.realpath(os.path.dirname(path)), ())


def _layer(
    table: dict[str, Any], name: str, source: str, text: str, base: str, section: tuple[str, ...]
) -> PolicyLayer:
    """Make one layer of a table, with its clauses checked."""
    category = ""
    if name.startswith(AGENT) and "category" in table:
        table = dict(table)
        category = table.pop("category")
        if not isinstance(category, str) or not category:
            raise PolicyError(f"{_where(source, text, (*section, 'category'))}category must be a name")
    if isinstance(table.get("workspace"), str):
        table = {**table, "workspace": {"path": table["workspace"]}}
    plain: dict[str, Any] = {}
    modes: dict[str, str] = {}
    for field, value in _fields(table):
        where = _where(source, text, (*section, *field.split(".")))
        mode = _list_mode(field, value, where)
        if mode == EXTEND and name == CEILING:
            raise PolicyError(f"{where}{field}: a ceiling has nothing to extend", hint="write a plain list")
        _put(plain, field, value[mode] if mode else value)
        modes[field] = mode
    try:
        clauses = check_clauses(plain, base)
    except InvalidValueError as error:
        raise located(error, text, source, section) from None
    extended = {field: _pop_list(clauses, field) for field, mode in modes.items() if mode == EXTEND}
    replaced = frozenset(field for field, mode in modes.items() if mode == REPLACE)
    return PolicyLayer(name, source, clauses, extended, replaced, category)


def _fields(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the clauses by their dotted names; each variable of `env` is a separate field."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and (key == "env" or not _has_list_mode(value)):
            found += [(f"{key}.{part}", item) for part, item in value.items()]
        else:
            found.append((key, value))
    return found


def _has_list_mode(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and set(value) <= {EXTEND, REPLACE}


def _list_mode(field: str, value: object, where: str) -> str:
    """Whether a list extends or replaces that of a less specific layer; empty if it does not say."""
    if not isinstance(value, dict) or not _has_list_mode(value):
        return ""
    if len(value) > 1:
        raise PolicyError(f"{where}{field} both extends and replaces", hint=f"write {EXTEND} or {REPLACE}")
    (mode,) = value
    if not isinstance(value[mode], list):
        raise PolicyError(
            f"{where}{field}: only a list can extend or replace another",
            hint=f"write {field} = {{ {mode} = [...] }}",
        )
    return str(mode)


def _put(table: dict[str, Any], field: str, value: Any) -> None:
    key, _, part = field.partition(".")
    if part:
        table.setdefault(key, {})[part] = value
    else:
        table[key] = value


def _pop_list(table: dict[str, Any], field: str) -> list[str]:
    """Remove a list from the clauses and return it."""
    key, _, part = field.partition(".")
    if not part:
        return list(table.pop(key))
    items = list(table[key].pop(part))
    if not table[key]:
        del table[key]
    return items


def _merge_layers(layers: tuple[PolicyLayer, ...]) -> Resolution:
    """Merge layers into one policy, the most specific last."""
    table: dict[str, Any] = {}
    origins: dict[str, tuple[str, ...]] = {}
    defaults = Policy().table(full=True)
    for layer in layers:
        for field, value in _fields(layer.clauses):
            had = origins.get(field)
            if isinstance(value, list) and had and field not in layer.replaced:
                raise PolicyError(
                    f"{layer.source}: {layer.name} writes {field}, and so does {' and '.join(had)}",
                    hint=f"write {field} = {{ {EXTEND} = [...] }}, or {{ {REPLACE} = [...] }}",
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
                    f"{layer.source}: {layer.name} extends {field}, which is not a list",
                    hint=f"write {field} = {{ {REPLACE} = [...] }}",
                )
            _put(table, field, [*had_list, *(item for item in more if item not in had_list)])
            origins[field] = (*origins.get(field, ("default",) if had_list else ()), layer.name)
    last = layers[-1] if layers else None
    return Resolution(_policy(table, last), origins, layers)


def _policy(table: dict[str, Any], layer: PolicyLayer | None) -> Policy:
    try:
        return Policy(**anchored(table, None))
    except PolicyError as error:
        where = f"{layer.source}: {layer.name}: " if layer is not None else ""
        raise PolicyError(f"{where}{error.message}", hint=error.hint) from None


def _hint(word: str, known: Mapping[str, PolicyLayer], otherwise: str) -> str:
    return nearest(word, known) if known else otherwise


def _where(source: str, text: str, key: tuple[str, ...]) -> str:
    line = line_of(text, key, None)
    return f"{source}:{line}: " if line else f"{source}: "
