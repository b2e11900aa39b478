"""Git as the user has it: the repository of a linked worktree, and the user's name and e-mail.

Files of the workspace are untrusted. A `.git` file may name any directory, so the file alone is not reason
enough to show that directory. It is shown only if it is a repository that names this worktree in turn, and
nothing else: an archive can turn a directory of the user's into a bare repository by adding files to it, but
cannot take the user's files away. Nothing is executed, and git itself is not started, because its
configuration may name commands.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping

import msgspec

from stockade.linux.path_lookup import covers
from stockade.linux.user import Caller
from stockade.resolve.toolchain.installs import SECRETS, looks_like_home, names_in
from stockade.workspace.version_control.git_config import LARGEST, parse
from stockade.workspace.version_control.repositories import pointer, small

#: Files of a repository that exist to hold credentials or addresses.
PRIVATE = ("credentials", "credential-cache", "remotes", "branches", "annex/creds")
#: How the names of files begin that may hold them beside other things.
MIXED = ("config", "FETCH_HEAD")
#: Where git records each command that moved a branch, such as `pull` and the address that it was given.
LOGS = "logs"
#: A password or a token in an address.
_ADDRESS = re.compile(rb"://[^/\s@:]*:[^/\s@]+@|://[^/\s@:]{20,}@")
#: That, or a setting that holds one.
_CREDENTIALS = re.compile(
    _ADDRESS.pattern + rb"|extraheader|authorization|passw|token|secret|\[\s*credential"
    rb"|smtppass|cookiefile|sslkey",
    re.IGNORECASE,
)
#: What git and its common extensions keep at the top of a repository.
_OF_GIT = re.compile(
    r"([A-Z]+_)?HEAD|(COMMIT_EDIT|MERGE_|SQUASH_|TAG_EDIT)MSG|MERGE_(MODE|RR|AUTOSTASH)|AUTO_MERGE|BISECT_\w+"
    r"|annex|branches|config(\.worktree)?|description|gc\.(log|pid)|hooks|index|info|lfs|logs|modules|objects"
    r"|packed-refs|refs|reftable|rr-cache|sequencer|shallow|svn|worktrees|fsmonitor--daemon(\.ipc)?|\w+\.lock"
)
#: How many repositories of submodules, and directories of logs in each, are searched for credentials, and how
#: many files one identity reads.
MOST_SUBMODULES, MOST_LOGS, MOST_FILES = 1000, 1000, 20


class LinkedWorktree(msgspec.Struct, frozen=True):
    """The repository that a workspace is a linked worktree of, and the paths in it that stay hidden."""

    repository: str
    hidden: tuple[str, ...]

    @property
    def note(self) -> str:
        """What the result says about the hidden paths; empty if there are none."""
        if not self.hidden:
            return ""
        names = ", ".join(os.path.relpath(path, self.repository) for path in self.hidden[:5])
        return f"{self.repository}: hidden because they may hold credentials: {names}"


def linked_worktree(workspace: str, caller: Caller) -> LinkedWorktree | None:
    """Return the repository of a workspace that `git worktree add` has made; None for any other directory."""
    administration = named_by(f"{workspace}/.git")
    if not administration or os.path.basename(os.path.dirname(administration)) != "worktrees":
        return None
    repository = os.path.dirname(os.path.dirname(administration))
    if not (_points_back(administration, workspace) and _is_repository(repository)):
        return None
    if covers(workspace, repository) or covers(repository, workspace) or not _is_fit(repository, caller):
        return None
    if not all(_owner(path) in (0, caller.uid) for path in (repository, administration)):
        return None
    return LinkedWorktree(repository, tuple(_with_credentials(repository)))


def named_by(file: str) -> str:
    """Return the real name of the directory that a `.git` file names; empty if it is no such file."""
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            return ""
    except OSError:
        return ""
    text = pointer(file)
    place = text.removeprefix("gitdir:").strip()
    return os.path.realpath(os.path.join(os.path.dirname(file), place)) if text != place and place else ""


def repository_above(directory: str) -> str:
    """Return the nearest directory above this one that has a `.git`; empty if there is none."""
    while (above := os.path.dirname(directory)) != directory:
        directory = above
        if os.path.lexists(f"{directory}/.git"):
            return directory
    return ""


def identity(caller: Caller, workspace: str) -> tuple[str, str]:
    """Return the name and e-mail that the user's own git has, from their environment and global files."""
    environ = caller.environ
    found = {
        "name": environ.get("GIT_AUTHOR_NAME", ""),
        "email": environ.get("GIT_AUTHOR_EMAIL", "") or environ.get("EMAIL", ""),
    }
    written = dict[str, str]()
    for key, value in _user_settings(_global_files(caller), caller.home, workspace):
        written[key] = value
    name, email = (found[key] or written.get(key, "") for key in ("name", "email"))
    return (name, email) if (name + email).isprintable() else ("", "")


def identity_file(caller: Caller, workspace: str) -> bytes:
    """Return the configuration of git with the user's name and e-mail; empty if their git has neither.

    As the system's configuration, it counts less than that of a repository.
    """
    name, email = identity(caller, workspace)
    lines = [f"\t{key} = {_quote(value)}\n" for key, value in (("name", name), ("email", email)) if value]
    return "".join(("[user]\n", *lines)).encode("utf-8", "surrogateescape") if lines else b""


def _quote(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _points_back(administration: str, workspace: str) -> bool:
    """Whether the repository's own files name the worktree, and the repository two directories up."""
    back, common = pointer(f"{administration}/gitdir"), pointer(f"{administration}/commondir")
    if not back or not common or os.path.basename(back) != ".git":
        return False
    named = os.path.realpath(os.path.dirname(os.path.join(administration, back)))
    repository = os.path.realpath(os.path.join(administration, common))
    return named == workspace and repository == os.path.dirname(os.path.dirname(administration))


def _is_repository(path: str) -> bool:
    """Whether a directory is a repository, and has no files of the user's beside those of git."""
    if not os.path.isfile(f"{path}/HEAD"):
        return False
    if not all(os.path.isdir(f"{path}/{name}") for name in ("objects", "refs")):
        return False
    return os.path.basename(path) == ".git" or all(map(_OF_GIT.fullmatch, names_in(path)))


def _is_fit(path: str, caller: Caller) -> bool:
    """Whether a directory may be shown without a clause: no home, and no place of secrets."""
    home = os.path.realpath(caller.home)
    secrets = [f"{home}/{name}" for name in SECRETS]
    if covers(path, home) or looks_like_home(path) or path.count("/") < 2:
        return False
    return not any(covers(place, path) or covers(path, place) for place in secrets)


def _owner(path: str) -> int:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return -1


def _with_credentials(repository: str) -> Iterator[str]:
    """Yield the paths of a repository that may hold credentials."""
    places = [repository, *(f"{repository}/worktrees/{name}" for name in names_in(f"{repository}/worktrees"))]
    for number, (place, inner, files) in enumerate(os.walk(f"{repository}/modules")):
        if number >= MOST_SUBMODULES:
            yield f"{repository}/modules"
            break
        if "HEAD" in files:
            places.append(place)
            inner[:] = [name for name in inner if name in ("modules", "worktrees")]
    for place in places:
        yield from (path for name in PRIVATE if _has_content(path := f"{place}/{name}"))
        mixed = (f"{place}/{name}" for name in names_in(place) if name.startswith(MIXED))
        yield from (path for path in mixed if _holds(path, _CREDENTIALS))
        if _is_logged(f"{place}/{LOGS}"):
            yield f"{place}/{LOGS}"


def _has_content(path: str) -> bool:
    """Whether a file exists, or a directory that is not empty or cannot be listed."""
    if not os.path.isdir(path):
        return os.path.lexists(path)
    return bool(names_in(path)) or not os.access(path, os.R_OK | os.X_OK)


def _is_logged(logs: str) -> bool:
    """Whether git's logs have an address with credentials, or are too many to tell."""
    for number, (place, _, files) in enumerate(os.walk(logs)):
        if number >= MOST_LOGS or any(_holds(f"{place}/{name}", _ADDRESS) for name in files):
            return True
    return False


def _holds(path: str, credentials: re.Pattern[bytes]) -> bool:
    """Whether a file has such text in it, or cannot be read."""
    text = small(path, LARGEST)
    return text is None or credentials.search(text) is not None


def _global_files(caller: Caller) -> list[str]:
    environ: Mapping[str, str] = caller.environ
    if named := environ.get("GIT_CONFIG_GLOBAL"):
        return [named]
    config = environ.get("XDG_CONFIG_HOME", "")
    config = config if config.startswith("/") else f"{caller.home}/.config"
    return [f"{config}/git/config", f"{caller.home}/.gitconfig"]


def _user_settings(files: list[str], home: str, workspace: str) -> Iterator[tuple[str, str]]:
    """Yield user.name and user.email of files and what they include, in git's order: the last one counts."""
    pending, left = files[::-1], MOST_FILES
    while pending and left:
        path, left = pending.pop(), left - 1
        included = list[str]()
        for one in parse(small(path, LARGEST) or b""):
            if one.section == "user" and not one.subsection and one.key in ("name", "email"):
                yield one.key, one.value
            elif one.key == "path" and (
                one.section == "include"
                or (one.section == "includeif" and _applies(one.subsection, home, path, workspace))
            ):
                included.append(os.path.join(os.path.dirname(path), _expand(one.value, home)))
        pending += included[::-1]


def _applies(condition: str, home: str, file: str, workspace: str) -> bool:
    """Whether `gitdir:DIRECTORY/` names a directory around the workspace; other conditions do not count."""
    kind, _, place = condition.partition(":")
    if kind not in ("gitdir", "gitdir/i") or not place.endswith("/"):
        return False
    place = _expand(place, home)
    place = os.path.join(os.path.dirname(file), place) if place.startswith("./") else place
    return place.startswith("/") and covers(os.path.realpath(place), workspace)


def _expand(path: str, home: str) -> str:
    return home + path[1:] if path.startswith("~/") else path
