"""Where a policy comes from: a file that the user names, or the files that apply here.

Flags override the project's file, and that overrides the user's own. The
author of the project wrote the project's file, so it may only narrow: the
policy with it must stay within the policy without it, unless the user has
trusted its exact bytes and what its paths mean. Links are followed before the
comparison, as far as a grant may lead through them (`links`), and the
resulting policy has only real names, so that the paths that were compared are
the paths that are opened.

A file above the current directory shows its own directory only if the user
has trusted it with that directory as the workspace (ADR 55): whatever else lies
there, a repository too, may have come with a download.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError, typed
from stockade.linux.path_lookup import COUNTED, Lookup, covers, look_up
from stockade.policy.merging import merge, overlay_tables
from stockade.policy.model import Policy
from stockade.policy.patterns import is_pattern, is_relative
from stockade.policy.profile import profile
from stockade.policy.toml import (
    LOOP,
    RECEIPTS,
    SECTION,
    anchored,
    clauses,
    decode,
    directory_of,
    load,
    protect_source,
    read_file_if_any,
    text_of,
)
from stockade.policy.values import expand, literal, show
from stockade.resolve.config_files import (
    LAYERS,
    NAMES,
    config_dir,
    config_file,
    find_layers,
)
from stockade.resolve.paths import hidden_paths
from stockade.resolve.paths.policy_paths import MODES, NamedPath, real
from stockade.state import state_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.resolve.agent_layers import Layers

#: Up to this many lines of a project's profile are listed one by one.
FEW = 3
#: The clauses that grant paths.
PATHS = ("read", "write", "exec")
#: A path as its clause writes it: the key of the clause, and the text.
Written = tuple[str, str]


class PolicySource(msgspec.Struct, frozen=True):
    """A policy, the files that it comes from, and whether its paths are real names (for `resolve`)."""

    policy: Policy
    sources: tuple[str, ...]
    pinned: bool = False


class Project(msgspec.Struct, frozen=True):
    """A project's own policy: its file, the exact bytes, and the clauses it writes."""

    path: str
    data: bytes
    clauses: dict[str, Any]

    @property
    def paths(self) -> list[Written]:
        """The paths that it grants, each with the key of its clause."""
        found = [(key, path) for key in PATHS for path in self.clauses.get(key, ())]
        return found + [
            ("workspace", path) for path in [self.clauses.get("workspace", {}).get("path")] if path
        ]

    def lookups(self, home: str, cwd: str, environ: Mapping[str, str]) -> dict[Written, Lookup]:
        """Look up what these paths name now."""
        return {(key, path): _look_up(key, path, home, cwd, environ) for key, path in self.paths}

    @property
    def hash(self) -> str:
        from stockade.linux.sha256 import sha256

        return sha256(self.data).hexdigest()


def discover(
    cwd: str,
    environ: Mapping[str, str],
    home: str,
    *,
    flags: Mapping[str, Any] | None = None,
    file: str | None = None,
    workspace: str | None = None,
    agent: str = "",
    category: str = "",
    hash: str = "",
) -> PolicySource:
    """Find the policy for a run in `cwd`.

    `file` is a policy that the user named (`-p`); then no other file counts, and it must have the SHA-256
    `hash` if one is given. `workspace` is the directory to work in if no file names one. For an `agent`, or
    any agent of a `category`, its layers take the place of the user's own policy. The resulting policy is
    within the layers' ceiling.
    """

    config = config_dir(environ, home)
    place = find_layers(config)
    known = None if place is None else _load_layers(place)
    if (agent or category) and known is None:
        raise PolicyError(
            f"there are no layers for the agent {agent or category!r}",
            hint=f"write them to {config}/{LAYERS}.toml: [global], [agent.NAME], and clauses below each",
        )
    if (agent or category) and file is not None:
        raise PolicyError(f"you named both the policy {file} and an agent", hint="name one of them")
    own, sources = (
        _load_user_policy(config_file(environ, home)) if file is None else (load(file, hash=hash), (file,))
    )
    denied: list[tuple[str, Iterable[str]]] = [(directory_of(source), own.deny) for source in sources]
    if known is not None and (agent or category):
        found = known.resolve(agent, category)
        own, sources = found.policy, tuple(dict.fromkeys(layer.source for layer in found.layers))
        denied = [(directory_of(layer.source), layer.denied) for layer in found.layers]
    chosen = _add_project_and_flags(
        cwd, environ, home, flags or {}, own, workspace, sources, denied, file is None
    )
    if file is not None:
        protected = protect_source(chosen.policy, file, home, cwd, environ)
        chosen = msgspec.structs.replace(chosen, policy=protected)
    if known is None or known.ceiling is None:
        return chosen
    # Real names from here on, so that the paths that were compared are the paths that are opened.
    return msgspec.structs.replace(
        chosen, policy=known.bounded(chosen.policy, home, cwd, environ), pinned=True
    )


def _load_layers(path: str) -> Layers:
    from stockade.resolve.agent_layers import Layers

    return Layers.load(path)


def _load_user_policy(path: str) -> tuple[Policy, tuple[str, ...]]:
    """Return the user's own policy and its file; the default policy and no file if there is none."""
    return (load(path, besides=(RECEIPTS,)), (path,)) if os.path.lexists(path) else (Policy(), ())


def _add_project_and_flags(
    cwd: str,
    environ: Mapping[str, str],
    home: str,
    flags: Mapping[str, Any],
    own: Policy,
    workspace: str | None,
    sources: tuple[str, ...],
    denied: list[tuple[str, Iterable[str]]],
    with_project: bool,
) -> PolicySource:
    project = find_project(cwd, home) if with_project else None
    root = _project_workspace(project, home, cwd, environ) if project is not None and workspace else ""
    if project is not None and root not in ("", workspace):
        from stockade.resolve.trust import is_agreed_workspace

        if is_agreed_workspace(project, root, state_dir(environ, home)):
            workspace = root
    named, own = own, with_workspace(own, workspace)
    if project is None:
        return PolicySource(_deny_beside_files(merge(own, flags), denied, home, cwd, environ), sources)
    without, whole = layers(own, project, flags)
    allowed = real_names(without, home, cwd, environ)
    found = lookups(whole, home, cwd, environ)
    asked = _replace_names(whole, found, home, cwd, environ)
    # The user's `deny` stays, even for a project that is trusted and works in another directory.
    kept = (path if path.endswith("?") or not is_pattern(path) else f"{path}?" for path in allowed.deny)
    asked = add_denied(asked, (path for path in kept if path.removesuffix("?") not in asked.deny))
    beyond = _excess_of_project(asked, allowed, home, environ)
    if beyond:
        from stockade.resolve.trust import recorded, trusted

        state = state_dir(environ, home)
        if not trusted(project, found, state):
            since = " has changed since you trusted it, and" if project.path in recorded(state) else ""
            hint = f"read it; if you agree, run: stockade trust {typed(project.path)}"
            what = "asks for more than your own policy allows:\n" + "\n".join(beyond)
            if root and root != workspace:
                at_root = merge(with_workspace(named, root), flags)
                if not _excess_of_project(asked, real_names(at_root, home, cwd, environ), home, environ):
                    what = f"asks for {root} as the workspace, and you are in {cwd}"
                    hint += "; to work in this directory alone: -w ."
            raise PolicyError(f"{project.path}{since} {what}", hint=hint)
    denied.append((os.path.dirname(project.path), project.clauses.get("deny", ())))
    asked = _deny_beside_files(asked, denied, home, cwd, environ)
    asked = protect_source(asked, project.path, home, cwd, environ)
    return PolicySource(asked, (*sources, project.path), pinned=True)


def _project_workspace(project: Project, home: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return the project's directory if its file names that as the workspace, and "" otherwise."""
    rule, directory = project.clauses.get("workspace"), os.path.dirname(project.path)
    if rule is None or "path" not in rule:
        return ""
    named = _look_up("workspace", rule["path"], home, cwd, environ).name
    return directory if named == directory else ""


def add_denied(policy: Policy, paths: Iterable[str]) -> Policy:
    """Return the policy with these paths denied too."""
    more = tuple(path for path in dict.fromkeys(paths) if path not in policy.deny)
    return msgspec.structs.replace(policy, deny=(*policy.deny, *more)) if more else policy


def _excess_of_project(asked: Policy, allowed: Policy, home: str, environ: Mapping[str, str]) -> list[str]:
    """Describe what a project asks for beyond the user's policy."""
    from stockade.policy.compare import excess
    from stockade.resolve.paths import protected_search

    # A variable that the user passes on keeps the user's value, which a project must not change.
    replaced = [name for name in allowed.pass_env if name in asked.env and name not in allowed.env]
    found = _summarise_profile(excess(asked, allowed, home), asked, allowed, home) + [
        f"env.{name} = {show(asked.env[name])} where you pass on your own" for name in replaced
    ]
    return found or protected_search.beyond(asked, allowed, environ, home)


def _summarise_profile(beyond: list[str], asked: Policy, allowed: Policy, home: str) -> list[str]:
    """Replace the lines that come from the project's profile by one: they may be tens of paths."""
    from stockade.policy.compare import excess

    if asked.profile == allowed.profile:
        return beyond
    own = set(excess(msgspec.structs.replace(asked, profile=allowed.profile), allowed, home))
    of_profile = [line for line in beyond if line not in own]
    if len(of_profile) <= FEW:
        return beyond
    shows = profile(asked.profile).description
    words = f"profile = {show(asked.profile)}: {shows} (`stockade profiles {asked.profile}`)"
    return [words, *(line for line in beyond if line in own)]


def layers(own: Policy, project: Project, flags: Mapping[str, Any]) -> tuple[Policy, Policy]:
    """Return the policy without the project's file, and with it between the user's own and the flags."""
    merged = overlay_tables(own.table(), project.clauses, grow=False)
    # The user's `deny` and `hold_back` stay, even for a project that is trusted.
    merged["deny"] = [*own.deny, *merged.get("deny", ())]
    merged["hold_back"] = [*own.hold_back, *merged.get("hold_back", ())]
    if isinstance(own.net, tuple) and isinstance(rules := project.clauses.get("net"), list) and rules:
        # So do the user's own rules that deny.
        merged["net"] = [*rules, *(rule for rule in own.net if rule.startswith("!"))]
    try:
        between = Policy(**anchored(merged, os.path.dirname(project.path)))
    except PolicyError as error:
        message = f"{project.path} conflicts with your own policy: {error.message}"
        raise PolicyError(message, hint=error.hint) from None
    return merge(own, flags), merge(between, flags)


def find_project(cwd: str, home: str) -> Project | None:
    """Find the nearest policy file at or above `cwd`, within its repository and below the home."""
    directory = os.path.realpath(cwd) if cwd else "/"
    top = os.path.realpath(home)
    while directory not in ("/", top):
        try:
            info = os.stat(directory)
        except OSError:
            return None
        # A directory that everybody can write to, such as /tmp, is not a project. If the user owns it and the
        # policy, that is refused, not skipped: otherwise a program could disable the policy with a chmod.
        shared, sticky = bool(info.st_mode & stat.S_IWOTH), bool(info.st_mode & stat.S_ISVTX)
        own = info.st_uid == os.geteuid() and (not sticky or _has_own_policy(directory))
        if (own or not shared) and (found := read_project(directory)) is not None:
            if shared:
                restore = f"run: chmod o-w {typed(directory)}"
                move = "move it to a directory that only you can write to; if no other user needs this one, "
                raise PolicyError(
                    f"{found.path} is not used, because everybody can write to {directory}",
                    hint=move + restore if sticky else restore,
                )
            return found
        if _is_repository(os.path.join(directory, ".git")):
            return None
        directory = os.path.dirname(directory)
    return None


def _has_own_policy(directory: str) -> bool:
    """Whether a directory has a file of the user's that may hold a policy."""
    for name in NAMES:
        with contextlib.suppress(OSError):
            if os.lstat(os.path.join(directory, name)).st_uid == os.geteuid():
                return True
    return False


def _is_repository(path: str) -> bool:
    """Whether git accepts it as a repository. A program can make an empty directory of that name."""
    return os.path.isfile(path) or os.path.lexists(os.path.join(path, "HEAD"))


def read_project(directory: str, only: str = "") -> Project | None:
    """Read the policy of a directory (a real name): stockade.toml, or [tool.stockade] in pyproject.toml.

    With `only`, one of these names, the other file is not looked at.
    """
    found = []
    for name in (only,) if only else NAMES:
        path = os.path.join(directory, name)
        if (data := read_file_if_any(path)) is None:
            continue
        section = SECTION if name == NAMES[1] else ()
        if section and b"stockade" not in data:  # most are not for us, well-formed or not
            continue
        text = text_of(data, path)
        table = clauses(text, base=directory, name=path, section=section)
        if table or not section or loop_table(text, path, section):
            found.append(Project(path, data, table))
    if len(found) > 1:
        raise PolicyError(
            f"{directory} has two policies: {NAMES[0]}, and [{'.'.join(SECTION)}] in {NAMES[1]}",
            hint="remove one of them",
        )
    return found[0] if found else None


def loop_table(text: str, name: str, section: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a policy file says about `stockade loop`, which is no part of the policy."""
    table: Any = decode(text, name)
    for part in (*section, LOOP):
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise PolicyError(
            f"{name}: {LOOP} must be a table", hint=f"write [{LOOP}], and verify = ... below it"
        )
    return table


def with_workspace(policy: Policy, path: str | None) -> Policy:
    """Return the policy with a workspace, unless it names one itself."""
    if path is None or policy.workspace is not None:
        return policy
    return msgspec.structs.replace(policy, workspace=literal(path))


def _deny_beside_files(
    policy: Policy,
    denied: Iterable[tuple[str, Iterable[str]]],
    home: str,
    cwd: str,
    environ: Mapping[str, str],
) -> Policy:
    """Also deny the paths that policy files name in their own directories, if the policy shows them.

    `denied` are the directories of the files, and what each file denies.
    """
    if not any(is_relative(path) for _, paths in denied for path in paths):
        return policy
    real_policy = real_names(msgspec.structs.replace(policy, deny=()), home, cwd, environ)
    root = workspace_root(real_policy)
    shown = [path.removesuffix("?").replace("$$", "$") for path in (*real_policy.read, *real_policy.write)]
    return add_denied(
        policy,
        (path for base, paths in denied for path in hidden_paths.denied_beside(base, paths, root, shown)),
    )


def workspace_root(policy: Policy) -> str:
    """Return the directory of the workspace, by its real name; empty if there is none."""
    return "" if policy.workspace is None else policy.workspace.path.replace("$$", "$")


def lookups(policy: Policy, home: str, cwd: str, environ: Mapping[str, str]) -> dict[Written, Lookup]:
    """Look up what every path that the policy grants names now."""
    written: list[Written] = [(key, path) for key in PATHS for path in getattr(policy, key) or ()]
    if policy.workspace is not None:
        written.append(("workspace", policy.workspace.path))
    return {(key, path): _look_up(key, path, home, cwd, environ) for key, path in written}


def _look_up(key: str, path: str, home: str, cwd: str, environ: Mapping[str, str]) -> Lookup:
    # In the name of a workspace a ? at the end is part of the name.
    wanted = path if key == "workspace" else path.removesuffix("?")
    return look_up(expand(wanted, f"{key} = {show(path)}", home=home, cwd=cwd, environ=environ)).close()


def real_names(policy: Policy, home: str, cwd: str, environ: Mapping[str, str], *, root: str = "") -> Policy:
    """Return the policy with real names; raise PolicyError where a link must not decide the name.

    `deny` is relative to `root`, or else to the policy's own workspace.
    """
    return _replace_names(policy, lookups(policy, home, cwd, environ), home, cwd, environ, root)


def _replace_names(
    policy: Policy,
    found: Mapping[Written, Lookup],
    home: str,
    cwd: str,
    environ: Mapping[str, str],
    root: str = "",
) -> Policy:
    _check_links(policy, found, cwd, home)
    table = policy.table()
    for key in PATHS:
        if key in table:
            table[key] = [real(found[key, path], path) for path in table[key]]
    if "exec" in table:
        table["exec"] = [_real_pattern(found["exec", path], path) for path in policy.exec or ()]
    if policy.workspace is not None:
        name = literal(found["workspace", policy.workspace.path].name)
        table["workspace"] = {**table["workspace"], "path": name}
        root = root or name.replace("$$", "$")
    table["deny"] = list(hidden_paths.real_names(policy.deny, root, home=home, environ=environ))
    return Policy(**table)


def _check_links(policy: Policy, found: Mapping[Written, Lookup], cwd: str, home: str) -> None:
    """Refuse a path that leaves its tree through a link."""
    if not any(lookup.links for lookup in found.values()):
        return
    from stockade.policy.patterns import is_included
    from stockade.resolve.paths import links

    named, programs, root = [], [], ""
    for (key, path), lookup in found.items():
        clause = f"{key} = {show(path)}"
        if key == "exec":
            programs.append((clause, lookup))
            continue
        access = key
        if policy.workspace is not None and key == "workspace":
            root, access = lookup.name, MODES[policy.workspace.mode]
        named.append(NamedPath(clause, access, lookup, key))
    bounds = links.Bounds.of(named, root, cwd, home)
    links.check(named, bounds, profile(policy.profile).system)
    outs = [bounds.exit(lookup) for _, lookup in programs]
    without_links = [lookup.name for (_, lookup), out in zip(programs, outs, strict=True) if out is None]
    for (clause, lookup), out in zip(programs, outs, strict=True):
        if out is not None and not is_included(lookup.name, without_links):
            raise links.refusal(clause, lookup.name, out, "exec")


def _real_pattern(lookup: Lookup, path: str) -> str:
    """Return the real name of a pattern; one with wildcards keeps the directory that it is relative to."""
    name = real(lookup, path)
    ground = literal(lookup.ground)
    if "*" not in path or not ground or not covers(ground, name):
        return name
    return f"{ground.rstrip('/')}{COUNTED}{name[len(ground) :].lstrip('/')}"
