"""Whether one policy asks for no more than another.

`RULES` says for every clause what "no more" means. A clause without a rule
counts as more wherever it differs, so that a new clause cannot be forgotten here.

Files are compared by effect, not clause by clause. A policy gives each path
an access by the longest of its clauses that covers it, and access only changes
at a path that some clause names. So one policy stays within another exactly
if, at every path that either of them names, it gives no more access there.
A path that ends in ? counts only while it exists, so each path is compared
once for each part of it that may or may not exist. The order is reflexive and
transitive because "no more" is.

Paths are compared as text: a caller that compares policies of different authors
must first replace links, ~ and relative paths (`discover` does).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Literal

from stockade.controls import Control
from stockade.policy import commit_rules
from stockade.policy.model import (
    BACKENDS,
    DRAFTS,
    REPOSITORIES,
    TABLES,
    WEAKER,
    WEAKER_BY_DEFAULT,
    Limits,
    Policy,
    Reuse,
    Secret,
    limit_text,
)
from stockade.policy.patterns import is_included, is_pattern, is_relative, quote, unquote
from stockade.policy.profile import profile
from stockade.policy.values import literal, render, show, time_text

#: What "no more than the other policy" means, clause by clause; docs/reference/within.md shows the table.
RULES: dict[str, str] = {
    "profile": "compared by its effect: the paths that it shows, the variables that it passes, its "
    "limits, and whether the directories of your `PATH` are searched",
    "read": "at every path that either policy names, no more access: none, then read, then change a copy, "
    "then write; no sockets of the host that the other does not reach there; a path that ends in `?` is "
    "compared both as present and as absent",
    "write": "as `read`; what version control runs or obeys at a path that only this policy names stays "
    "read-only, since only `unprotect` and a path with `.git` or the like in it make it writable; when "
    "Stockade checks the policy of a project, of a run under a ceiling or of a child, it also searches the "
    "directories that the other can write to for repositories that run files there",
    "deny": "as `read`: a denied path gives no access; and every pattern of the other that could match "
    "something that is shown",
    "protect": "as `read`: a protected path can at most be read",
    "unprotect": "only paths that the other unprotects, relative to its own workspace; a repository in a "
    "writable directory, which no clause names, can at most be read, or changed in a copy",
    "hold_back": "every pattern that the other holds back; if the workspace is a directory in the "
    "other's, rewritten to be relative to it",
    "allow_commit": "only patterns that the other allows; if the workspace is a directory in the "
    "other's, rewritten to be relative to it",
    "exec": "only patterns of the other, or paths that one of them matches; without the clause only if the "
    "other has none either",
    "net": '`"open"` only if the other has it; otherwise every rule that allows is covered by rules of the '
    "other with the same ports: a host by itself or by `*.` above it, an address by a network around it, "
    "either by `*`, which covers no special address, `tcp://` only by `tcp://`, `udp://` only by `udp://`, "
    "`ask` only by `ask`, a rule for requests by one with its methods, path and "
    "query or more of them, or by a rule for its host; and every rule of the other that denies something of "
    "it, or an address that a name could lead to, is there too, or a wider one; the certificates and proxies "
    "that come with a network are those of your environment, the same for both",
    "net_roots": "the same; without rules for requests in `net` nothing is compared",
    "secrets": "only secrets that the other has, by their own clauses",
    **dict.fromkeys(
        (f"secrets.NAME.{name}" for name in ("from_env", "from_file", "from_command")), "the same"
    ),
    "secrets.NAME.hosts": "only hosts of the other's secret",
    "secrets.NAME.as": "only places that the other's secret names",
    "secrets.NAME.prefix": "anything: it changes placeholders alone",
    "secrets.NAME.inside": "anything: it says where placeholders are",
    "on_egress_end": '`"continue"` only if the other has it too; without rules in `net` nothing is compared',
    "proxy": "`true` only if the other has it",
    "env": "every variable that the other sets, with the same value; further variables are allowed",
    "pass_env": "only names that the other or its profile passes",
    "image": "the same",
    "backend": "only backends that the other may use; a backend that can leave a control weaker only in a "
    "list with every better one that the other may use, so that Stockade uses it only if those do not work",
    "accept": "only controls that the other accepts",
    "workspace": "by its own clauses; a policy without a workspace has nothing to compare",
    "workspace.path": "as `read`: the directory gives the access of its mode; if both change a copy, "
    "neither a directory around the other's nor one in it whose name a tool looks for (`.github`, `hooks`), "
    "because its commits would not hold back what the other's do",
    "workspace.mode": "as `read`: `ro` reads, `overlay` changes a copy, `rw` writes",
    "workspace.durable": "`true` if the other has it and both change a copy of the same path",
    "limits": "by its own clauses, with the profile's where the policy writes none",
    **{f"limits.{name}": "no larger; no limit is the largest" for name in Limits.__struct_fields__},
    **dict.fromkeys(WEAKER_BY_DEFAULT, "no larger; written, and so required, if the other writes it"),
    "syscalls": "by its own clauses",
    "syscalls.allow": "only calls that the other allows",
    "syscalls.deny": "every call that the other denies",
    "toolchain": "`true` only if the other is not `false`; only commands that the other names",
    "delegate": "`true` only if the other has it",
    "reuse": "only if the other has it",
    **{f"reuse.{name}": "no larger" for name in Reuse.__struct_fields__},
    "receipts": '`"batched"` only if the other has it',
}

NONE, READ, OVERLAY, WRITE = range(4)
WORDS = {READ: "read", OVERLAY: "change a copy of", WRITE: "write"}
#: Whether a program can connect to the host's sockets in a tree. It can in the system's own trees, unless
#: a `read` shows them once more: a narrower policy need not repeat that `read`.
UNREACHED, SYSTEM, REACHED = range(3)
NOTHING = (NONE, UNREACHED)
MODES = {"ro": READ, "overlay": OVERLAY, "rw": WRITE}


class PathAccess:
    """The access that one policy gives to each path. `shown` are the paths of its profile by other names."""

    def __init__(self, policy: Policy, shown: Iterable[str] | None = None) -> None:
        base = profile(policy.profile)
        shown = base.read if shown is None else shown
        shows = REACHED if Control.IPC in policy.accept else UNREACHED
        named = [(path, (READ, SYSTEM)) for path in (*base.system, *(f"/etc/{name}" for name in base.etc))]
        named += [(path, (READ, shows)) for path in (*shown, *policy.read)]
        named += [(path, (WRITE, REACHED)) for path in policy.write]
        #: By path, the access that the clauses give and whether sockets there can be reached.
        self.access: dict[str, tuple[int, int]] = {}
        #: Paths at which the clauses count only if they exist.
        self.optional: set[str] = set()
        self.protected: set[str] = set()
        #: The directory that rules for a commit are relative to.
        self.root = root = "" if policy.workspace is None else normal(policy.workspace.path)
        denied = [
            os.path.join(quote(root), path) if is_relative(path) else path
            for path in policy.deny
            if root or not is_relative(path)  # without a workspace a relative path hides nothing
        ]
        self.denied = {normal(unquote(path)) for path in denied if not is_pattern(path)}
        #: What these match is known only when a sandbox is made.
        self.patterns = {normal(path.removesuffix("?")) for path in denied if is_pattern(path)}
        self.unprotected = {
            normal(os.path.join(root, literal(path)))
            for path in policy.unprotected()
            if root or path.startswith("/")  # as with `deny`
        }
        self.durable = False
        if policy.workspace is not None:
            sockets = {"ro": shows, "overlay": UNREACHED, "rw": REACHED}
            self.access[root] = MODES[policy.workspace.mode], sockets[policy.workspace.mode]
            self.protected = {normal(os.path.join(root, literal(path))) for path in policy.protected()}
            self.durable = policy.workspace.durable
        for path, access in named:
            name = normal(path.removesuffix("?"))
            if not path.endswith("?"):
                self.optional.discard(name)
            elif name not in self.access:
                self.optional.add(name)
            had = self.access.get(name, NOTHING)
            self.access[name] = max(access, had, key=lambda one: one[0])

    def at(self, path: str) -> tuple[int, int]:
        """Return the access to a path that exists."""
        return self.along(_upwards(path), [len(path)])[0]

    def along(self, parts: list[str], existing: list[int], repository: int = READ) -> list[tuple[int, int]]:
        """Return the access to `parts[0]`, in the directories `parts[1:]`, for each length that may exist.

        The longest length comes first. A denied path gives no access, a protected one is at most readable;
        otherwise the longest clause counts.
        """
        if not self.denied.isdisjoint(parts):
            return [NOTHING] * len(existing)
        most = WRITE if self.protected.isdisjoint(parts) else READ
        accesses = []
        clauses = self._clauses(parts, repository)
        needs, (level, sockets) = next(clauses)
        for length in existing:
            while needs > length:
                needs, (level, sockets) = next(clauses)
            accesses.append((min(level, most), sockets))
        return accesses

    def _clauses(self, parts: list[str], most: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the access that clauses give to a path, the longest first, and the length that must exist."""
        repository = False
        for part in parts:
            if part in self.access:
                level, sockets = self.access[part]
                # In a directory that is writable for real, a repository that no clause names is read-only.
                granted = (most if repository and level == WRITE else level), sockets
                yield (len(part) if part in self.optional else 0), granted
            is_one = os.path.basename(part).lower() in REPOSITORIES
            repository = repository or (is_one and part not in self.unprotected)
        yield 0, NOTHING

    def reaches(self, pattern: str) -> bool:
        """Whether the policy shows something that a pattern of `deny` could match."""
        parts = pattern.split("/")
        first = next(number for number, part in enumerate(parts) if is_pattern(part))
        top = unquote("/".join(parts[:first])) or "/"
        below = (path for path in self.access if path.startswith(top.rstrip("/") + "/"))
        return any(self.at(path)[0] for path in (top, *below))


def _upwards(path: str) -> list[str]:
    """Return the path and every directory that it is in."""
    found = [path]
    while (end := path.rfind("/")) >= 0 and path != "/":
        path = path[:end] or "/"
        found.append(path)
    return found


def _at_home(path: str, home: str) -> str:
    """Return a path of a profile by its real name, as `resolve` opens it."""
    if not home or not path.startswith("~"):
        return path
    optional = "?" if path.endswith("?") else ""
    return literal(os.path.realpath(home + path[1:].removesuffix("?"))) + optional


def normal(path: str) -> str:
    """Return one spelling of a path; a relative one starts with a dot: `.` covers `a` but not `../a`."""
    path = os.path.normpath(path)
    if path.startswith("//"):  # POSIX lets two slashes mean something else; Linux does not
        return path[1:]
    return path if path.startswith(("/", "~", "$", "../")) or path in (".", "..") else f"./{path}"


def limits(policy: Policy) -> Limits:
    """Return the limits in force: the profile's where the policy writes none."""
    default = profile(policy.profile).limits
    return Limits(
        **{
            name: getattr(default, name) if (value := getattr(policy.limits, name)) is None else value
            for name in Limits.__struct_fields__
        }
    )


def clauses() -> Iterator[str]:
    """Yield the dotted name of every clause, those of its tables too."""
    for name in Policy.__struct_fields__:
        yield name
        if name in TABLES:
            yield from (f"{name}.{inner}" for inner in TABLES[name].__struct_fields__)
        if name == "secrets":
            yield from (f"{name}.NAME.{inner}" for inner in Secret.__struct_encode_fields__)


def excess(mine: Policy, other: Policy, home: str = "") -> list[str]:
    """Describe what `mine` asks for beyond `other`. `home` is the real name of the user's home."""
    if mine == other:
        return []
    shown = {
        name: [_at_home(path, home) for path in profile(name).read] for name in {mine.profile, other.profile}
    }
    files, theirs = PathAccess(mine, shown[mine.profile]), PathAccess(other, shown[other.profile])
    found = _files(files, theirs)
    # By name too: no policy says which repositories a tree has. The same relative path in another
    # workspace names another file.
    unprotected = sorted(files.unprotected - theirs.unprotected)
    found += [f"unprotect = {show(path.removeprefix('./'))}" for path in unprotected]
    found += commit_rules.excess(mine, other, *_tops(files, theirs))
    if mine.exec is None and other.exec is not None:
        found.append(f"execute any file, where only {show(other.exec)} is allowed")
    elif mine.exec is not None and other.exec is not None:
        found += [f"execute {pattern}" for pattern in mine.exec if not is_included(pattern, other.exec)]
    if mine.net and other.net != "open":
        found += _net(mine.net, other.net)
    if mine.net and mine.net != "open" and (mine.on_egress_end, other.on_egress_end) == ("continue", "end"):
        found.append('on_egress_end = "continue": the program goes on without its egress process')
    if mine.proxy and not other.proxy:
        found.append("proxy = true: a proxy inside")
    if any(" " in rule for rule in mine.net) and other.net != "open" and mine.net_roots != other.net_roots:
        found.append(f"net_roots = {show(mine.net_roots)} where {show(other.net_roots)} is asked for")
    found += _secrets(mine, other)
    found += _variables(mine, other)
    if mine.image != other.image:
        found.append(f"image = {show(mine.image)} where {show(other.image)} is asked for")
    calls, known = mine.syscalls, other.syscalls
    found += [f"syscalls.allow = {show(name)}" for name in calls.allow if name not in known.allow]
    found += [f"without syscalls.deny = {show(name)}" for name in known.deny if name not in calls.deny]
    if mine.toolchain is not False and other.toolchain is False:
        found.append("toolchain: shows the installs that commands belong to")
    found += [f"toolchain = {show(name)}" for name in _installs(mine) if name not in _installs(other)]
    if _searches_path(mine) and not _searches_path(other):
        found.append(f"profile = {show(mine.profile)}: searches the directories of your PATH")
    if mine.delegate and not other.delegate:
        found.append("delegate = true: the program may ask for further sandboxes")
    if mine.receipts == "batched" and other.receipts != "batched":
        found.append('receipts = "batched": runs return before their receipts are signed')
    found += [f"accept = {show(c.value)}: a weaker wall" for c in mine.accept if c not in other.accept]
    own, most = limits(mine), limits(other)
    for name in Limits.__struct_fields__:
        asked, had = getattr(own, name), getattr(most, name)
        if (math.inf if asked is None else asked) > (math.inf if had is None else had):
            words = "none" if asked is None else limit_text(name, asked)
            found.append(f"limits.{name}: {words} where {limit_text(name, had)} is allowed")
    found += [
        f"without requiring {control}"
        for control in WEAKER_BY_DEFAULT
        if other.required(control) and control in mine.controls() and not mine.required(control)
    ]
    found += _reuse(mine.reuse, other.reuse)
    found += _backend(mine, other)
    found += [
        f"{name}: differs, and no rule says which is more"
        for name in clauses()
        if name not in RULES and _value(mine, name) != _value(other, name)
    ]
    return found


def _net(mine: tuple[str, ...] | Literal["open"], other: tuple[str, ...]) -> list[str]:
    if mine == "open":
        return ['net = "open": the host\'s network']
    from stockade.policy.net_comparison import excess as net_excess

    return net_excess(mine, other)


def _secrets(mine: Policy, other: Policy) -> Iterator[str]:
    for name, secret in mine.secrets.items():
        known = other.secrets.get(name)
        source = getattr(secret, secret.source)
        if known is None:
            yield f"secrets.{name}: its value goes to {', '.join(secret.hosts)}"
        elif (known.source, getattr(known, known.source)) != (secret.source, source):
            yield f"secrets.{name}.{secret.source} = {show(source)}: another value"
        else:
            yield from (
                f"secrets.{name}.hosts = {show(one)}" for one in secret.hosts if one not in known.hosts
            )
            yield from (f"secrets.{name}.as = {show(one)}" for one in secret.as_ if one not in known.as_)


def _tops(mine: PathAccess, other: PathAccess) -> tuple[str, str]:
    """Return what both policies' commit rules are relative to; empty unless they commit some same files."""
    roots = mine.root, other.root
    if not all(roots) or mine.at(mine.root)[0] != OVERLAY or other.access[other.root][0] != OVERLAY:
        return "", ""
    # A directory that the other writes for real needs no commit.
    written = other.at(mine.root)[0] == WRITE and commit_rules.between(*roots) is None
    return ("", "") if written else roots


def _value(policy: Policy, name: str) -> object:
    table, _, inner = name.rpartition(".")
    return getattr(getattr(policy, table), inner, None) if table else getattr(policy, inner)


def _variables(mine: Policy, other: Policy) -> Iterator[str]:
    for name, value in other.env.items():
        if name not in mine.env:
            yield f"without env.{name} = {show(value)}"
        elif mine.env[name] != value:
            yield f"env.{name} = {show(mine.env[name])} where {show(value)} is set"
    passed = {*profile(other.profile).pass_env, *other.pass_env}
    for name in (*profile(mine.profile).pass_env, *mine.pass_env):
        if name not in passed and name not in mine.env:
            yield f"pass_env = {show(name)}: a variable of the host"


def _searches_path(policy: Policy) -> bool:
    return profile(policy.profile).searches_path and policy.toolchain is not False and policy.exec is None


def _backend(mine: Policy, other: Policy) -> Iterator[str]:
    """Describe backends that the other may not use, and weaker ones without the better ones of the other.

    The best backend that works on the machine is used. So a policy may name a weaker one only together with
    every better one that the other may use: then the weaker one is used only where those do not work.
    """
    ours, theirs = _backends(mine), _backends(other)
    if not set(ours) <= set(theirs):
        yield f"backend = {show(mine.backend)} where {show(other.backend)} is asked for"
        return
    for name in ours:
        lacking = [control for control in WEAKER.get(name, ()) if control in mine.controls()]
        weaker = [control for control in lacking if not mine.required(control)]
        if any(control not in weaker and control is not Control.LIMITS_TASKS for control in lacking):
            continue  # the policy requires a control that this backend never has, so it is not used
        better = next((one for one in theirs[: theirs.index(name)] if one not in ours), "")
        if weaker and better:
            yield (
                f"backend = {show(mine.backend)}: {name} may leave {', '.join(weaker)} weaker, and "
                f"{show(other.backend)} uses it only where {better} does not work"
            )


def _backends(policy: Policy) -> list[str]:
    """Return the backends that a policy may use, the best first."""
    wanted = (policy.backend,) if isinstance(policy.backend, str) else policy.backend
    return [name for name in (*BACKENDS, *DRAFTS) if wanted == ("auto",) or name in wanted]


def _reuse(mine: Reuse | None, other: Reuse | None) -> list[str]:
    if mine is None:
        return []
    if other is None:
        return ["reuse: runs in sandboxes that other runs have used"]
    found = []
    for name in Reuse.__struct_fields__:
        asked, had = getattr(mine, name), getattr(other, name)
        if asked > had:
            texts = [str(value) if name == "requests" else f'"{time_text(value)}"' for value in (asked, had)]
            found.append(f"reuse.{name}: {texts[0]} where {texts[1]} is allowed")
    return found


def _installs(policy: Policy) -> tuple[str, ...]:
    return () if isinstance(policy.toolchain, bool) else policy.toolchain


def _files(mine: PathAccess, other: PathAccess) -> list[str]:
    levels: dict[str, int] = {}
    sockets: dict[str, int] = {}
    lost = False
    named = {*mine.access, *mine.protected, *mine.denied, *other.access, *other.protected, *other.denied}
    for path in sorted(named):
        parts = _upwards(path)
        level = reached = 0
        # Paths that `mine` needs to start do exist; beyond them each optional part makes a difference.
        must = next((len(part) for part in parts if part in mine.access and part not in mine.optional), 0)
        may = (len(part) for part in parts if part in mine.optional or part in other.optional)
        existing = [*(length for length in may if length > must), must]
        # Changes to a copy of a repository land only by a commit, so they are no more than mode rw.
        had_at = other.along(parts, existing, repository=OVERLAY)
        for would, had in zip(mine.along(parts, existing), had_at, strict=True):
            if would[0] > had[0]:
                level = max(level, would[0])
            elif would[1] == REACHED and had[1] == UNREACHED:
                reached = REACHED
            lost = lost or (would[0] == had[0] == OVERLAY and other.durable and not mine.durable)
        for found, asked in ((levels, level), (sockets, reached)):
            # A tree that was reported covers everything in it.
            above = next((part for part in parts[1:] if part in found), None)
            if asked and (above is None or found[above] != asked):
                found[path] = asked
        if any(levels.get(part) == WRITE for part in parts):
            sockets.pop(path, None)  # write access for real includes the sockets in it
    words = [f"{WORDS[access]} {path.removeprefix('./')}" for path, access in levels.items()]
    words += [f"connect to sockets in {path.removeprefix('./')}" for path in sockets]
    if lost:
        words.append("workspace.durable = false: a killed supervisor may lose changes")
    unhidden = sorted(pattern for pattern in other.patterns - mine.patterns if mine.reaches(pattern))
    return words + [f"without deny = {render(pattern.removeprefix('./'))}" for pattern in unhidden]
