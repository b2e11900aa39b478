"""Where a policy comes from: a file that was named, or the layers that apply here.

Flags lie over the project's file, and that over the user's own. The project's
file is written by whoever wrote the project, so unless the user has trusted
its exact bytes it may only narrow: the policy with it must stay within the
policy without it. Links in the project are followed before the comparison,
and the policy that comes out has real names only, so that what was compared
is what gets opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from errno import ENOENT
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.model import Policy
from stockade.policy.resolve import covers, names_of, real
from stockade.policy.text import RECEIPTS, SECTION, anchored, clauses, parse
from stockade.policy.values import literal, show
from stockade.state import state_dir

NAMES = ("stockade.toml", "pyproject.toml")
LARGEST = 1 << 20


class Discovered(msgspec.Struct, frozen=True):
    """A policy, the files it came from, and whether its paths are real names (for `resolve`)."""

    policy: Policy
    sources: tuple[str, ...]
    pinned: bool = False


class Project(msgspec.Struct, frozen=True):
    """A project's own policy: its file, the exact bytes, and the clauses it writes."""

    path: str
    data: bytes
    clauses: dict[str, Any]

    @property
    def hash(self) -> str:
        from stockade.digest import sha256

        return sha256(self.data).hexdigest()


def config_dir(environ: Mapping[str, str], home: str) -> str:
    """Where the user's own policy is."""
    shared = environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(shared if shared.startswith("/") else f"{home}/.config", "stockade")


def config_file(environ: Mapping[str, str], home: str) -> str:
    """The user's own file: a policy, and how receipts are made."""
    return os.path.join(config_dir(environ, home), "config.toml")


def read_file(path: str) -> bytes:
    """The bytes of a policy file: a regular one, of a size a policy can have. Never blocks."""
    try:
        # A pipe in place of the file would otherwise hold the caller until somebody writes.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PolicyError(f"{path} is not a regular file")
            data = b""
            while len(data) <= LARGEST and (part := os.read(fd, LARGEST + 1 - len(data))):
                data += part
        finally:
            os.close(fd)
    except OSError as error:
        hint = (
            "check the path; `stockade policy schema` says what a policy has" if error.errno == ENOENT else ""
        )
        raise PolicyError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if len(data) > LARGEST:
        raise PolicyError(f"{path} is larger than {LARGEST >> 20} MiB", hint="a policy is a few lines")
    return data


def load(path: str, *, besides: tuple[str, ...] = (), hash: str = "") -> Policy:
    """The policy in a file; its relative paths count from the file's directory.

    With `hash`, the SHA-256 of its bytes, any other content is refused.
    """
    base = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    section = SECTION if os.path.basename(path) == NAMES[1] else ()
    data = read_file(path)
    if hash:
        from stockade.digest import sha256

        if sha256(data).hexdigest() != hash:
            raise PolicyError(
                f"{path} is not what it was when its agent was given it",
                hint="read it; if you agree: stockade agents add NAME -p FILE",
            )
    return parse(text_of(data, path), base=base, name=path, section=section, besides=besides)


def merge(policy: Policy, flags: Mapping[str, Any]) -> Policy:
    """The policy with flags over it: lists grow, tables merge, other values are replaced; None says nothing.

    >>> merge(Policy(read=["/a"]), {"read": ["/b"], "limits": {"wall": "5s"}}).read
    ('/a', '/b')
    """
    return Policy(**_laid(policy.table(full=True), flags, grow=True)) if flags else policy


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
) -> Discovered:
    """The policy for a run in `cwd`.

    `file` is the policy that was named (`-p`); then no other file counts, and `hash` is
    what it must have in it, if that is known. `workspace`
    is the directory to work in where no file names one. For an `agent`, or one of a
    `category`, the layers for it take the place of the user's own policy. Whatever
    comes out is within the layers' ceiling.
    """
    from stockade.policy import layers

    config = config_dir(environ, home)
    place = layers.find(config)
    known = None if place is None else layers.Layers.load(place)
    if (agent or category) and known is None:
        raise PolicyError(
            f"there are no layers for the agent {agent or category!r}",
            hint=f"write them to {config}/{layers.NAME}.toml: [global], [agent.NAME] and clauses below",
        )
    if (agent or category) and file is not None:
        raise PolicyError(f"both the policy {file} and an agent are named", hint="name one of them")
    own, sources = _own(config_file(environ, home)) if file is None else (load(file, hash=hash), (file,))
    if known is not None and (agent or category):
        found = known.resolve(agent, category)
        own, sources = found.policy, tuple(dict.fromkeys(layer.source for layer in found.layers))
    chosen = _discover(
        cwd, environ, home, flags or {}, _with_workspace(own, workspace), sources, file is None
    )
    if known is None or known.ceiling is None:
        return chosen
    # What was compared is what is opened: real names, from here on.
    return msgspec.structs.replace(
        chosen, policy=known.bounded(chosen.policy, home, cwd, environ), pinned=True
    )


def _own(path: str) -> tuple[Policy, tuple[str, ...]]:
    """The user's own policy, and where it is written."""
    return (load(path, besides=(RECEIPTS,)), (path,)) if os.path.lexists(path) else (Policy(), ())


def _discover(
    cwd: str,
    environ: Mapping[str, str],
    home: str,
    flags: Mapping[str, Any],
    own: Policy,
    sources: tuple[str, ...],
    with_project: bool,
) -> Discovered:
    project = find_project(cwd, home) if with_project else None
    if project is None:
        return Discovered(merge(own, flags), sources)
    allowed, asked = (real_names(policy, home, cwd, environ) for policy in layers(own, project, flags))
    beyond = asked.excess(allowed)
    if beyond:
        from stockade.policy.trust import trusted

        if not trusted(project, state_dir(environ, home)):
            raise PolicyError(
                f"{project.path} asks for more than your own policy allows:\n" + "\n".join(beyond),
                hint=f"read it; if you agree, run: stockade trust {project.path}",
            )
    return Discovered(_keeping(asked, project.path), (*sources, project.path), pinned=True)


def layers(own: Policy, project: Project, flags: Mapping[str, Any]) -> tuple[Policy, Policy]:
    """The policy without the project's file, and the one with it between the user's own and the flags."""
    laid = _laid(own.table(), project.clauses, grow=False)
    # What the user hides stays hidden, also from a project that is trusted.
    laid["deny"] = [*own.deny, *laid.get("deny", ())]
    try:
        between = Policy(**anchored(laid, os.path.dirname(project.path)))
    except PolicyError as error:
        message = f"{project.path} does not go with your own policy: {error.message}"
        raise PolicyError(message, hint=error.hint) from None
    return merge(own, flags), merge(between, flags)


def find_project(cwd: str, home: str) -> Project | None:
    """The nearest policy file at or above `cwd`, not beyond its repository nor as far as the home."""
    directory = os.path.realpath(cwd)
    top = os.path.realpath(home)
    while directory not in ("/", top):
        try:
            mode = os.stat(directory).st_mode
        except OSError:
            return None
        # What anybody can write to, such as /tmp, is nobody's project.
        if not mode & stat.S_IWOTH and (found := read_project(directory)) is not None:
            return found
        if os.path.lexists(os.path.join(directory, ".git")):
            return None
        directory = os.path.dirname(directory)
    return None


def read_project(directory: str) -> Project | None:
    """The policy in a directory (a real name): stockade.toml, or [tool.stockade] in pyproject.toml."""
    found = []
    for name in NAMES:
        path = os.path.join(directory, name)
        try:
            data = read_file(path)
        except PolicyError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        section = SECTION if name == NAMES[1] else ()
        if section and b"stockade" not in data:  # most are somebody else's business, well-formed or not
            continue
        written = clauses(text_of(data, path), base=directory, name=path, section=section)
        if written or not section:
            found.append(Project(path, data, written))
    if len(found) > 1:
        raise PolicyError(
            f"{directory} has two policies: {NAMES[0]}, and [{'.'.join(SECTION)}] in {NAMES[1]}",
            hint="remove one",
        )
    return found[0] if found else None


def text_of(data: bytes, path: str) -> str:
    """The text of a policy file."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8 text") from None


def _with_workspace(policy: Policy, path: str | None) -> Policy:
    if path is None or policy.workspace is not None:
        return policy
    return msgspec.structs.replace(policy, workspace=literal(path))


def _laid(lower: Mapping[str, Any], upper: Mapping[str, Any], *, grow: bool) -> dict[str, Any]:
    result = dict(lower)
    for key, written in upper.items():
        if written is None:
            continue
        short = key == "workspace" and isinstance(written, str | os.PathLike)
        value = {"path": written} if short else written
        had = result.get(key)
        if isinstance(value, Mapping):
            result[key] = _laid(had if isinstance(had, Mapping) else {}, value, grow=grow)
        elif grow and isinstance(value, list | tuple) and isinstance(had, list | tuple):
            result[key] = [*had, *value]
        else:
            result[key] = value
    return result


def real_names(policy: Policy, home: str, cwd: str, environ: Mapping[str, str]) -> Policy:
    """The policy with every path replaced by its real name."""
    table = policy.table()
    for key in ("read", "write", "exec"):
        if key in table:
            table[key] = [real(path, home, cwd, environ, f"{key} = {show(path)}") for path in table[key]]
    table["deny"] = [
        literal(name) for path in policy.deny for name in names_of(path, home=home, cwd=cwd, environ=environ)
    ]
    if policy.workspace is not None:
        path = policy.workspace.path
        # A name that ends in ? is just a name here.
        name = real(f"{path}/.", home, cwd, environ, f"workspace = {show(path)}")
        table["workspace"] = {**table["workspace"], "path": name}
    return Policy(**table)


def _keeping(policy: Policy, path: str) -> Policy:
    """The policy with the project's own file protected, so that a run cannot prepare the next one's."""
    root = "" if policy.workspace is None else policy.workspace.path.replace("$$", "$")
    if not root or not covers(root, path):
        return policy
    return msgspec.structs.replace(policy, protect=(*policy.protect, os.path.relpath(path, root)))
