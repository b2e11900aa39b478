"""Paths in some directories that the host's version control leads to: hooks, commands, configuration.

A name alone does not say whether git runs a file: `core.hooksPath` makes any
directory a directory of hooks, a link in `.git/hooks` leads to any script, an
alias or a filter names a command. So we read the configuration that git,
Mercurial, Sapling and Jujutsu would read on the host, as it is there and never
as the program left it. A commit holds back the paths that it names, and where
a program can write directly, they are read-only. We execute nothing, and we
do not follow what a script of the host runs in turn.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stockade.linux import dirwalk
from stockade.linux.path_lookup import names_on_the_way
from stockade.policy.model import REPOSITORIES, is_repository
from stockade.workspace.version_control.git_config import LARGEST, MOST_SETTINGS, Setting, parse
from stockade.workspace.version_control.repositories import BARE, RepositorySearch, pointer, small

#: Limits for one commit: files and bytes of configuration, and files in directories of hooks.
MOST_FILES, MOST_BYTES, MOST_HOOKS = 4_000, 4 << 20, 100_000
#: The longest command to parse.
LONGEST_COMMAND = 10_000
#: Directories of a workspace, and entries in them, that a commit searches for repositories.
MOST_DIRECTORIES, MOST_ENTRIES = 100_000, 1_000_000
#: Bytes of the names of directories that are waiting to be searched.
MOST_NAMES = 8 << 20
#: The words of a command, split where a shell would split it, and at the = of an option.
_WORDS = re.compile(r"""[^\s'"`;|&()<>=${}]+""")

#: By section: the keys whose values git executes, or which name files that tell git what to execute or to
#: trust; an empty set stands for all keys.
COMMANDS: dict[str, frozenset[str]] = {
    "core": frozenset(
        {
            "fsmonitor",
            "sshcommand",
            "editor",
            "pager",
            "askpass",
            "gitproxy",
            "alternaterefscommand",
            "attributesfile",
        }
    ),
    "alias": frozenset(),
    "annex": frozenset(),
    "browser": frozenset({"cmd", "path"}),
    "credential": frozenset({"helper"}),
    "diff": frozenset({"external", "command", "textconv"}),
    "difftool": frozenset({"cmd", "path"}),
    "filter": frozenset({"clean", "smudge", "process"}),
    "gc": frozenset({"recentobjectshook"}),
    "gpg": frozenset({"program", "defaultkeycommand", "allowedsignersfile", "revocationfile"}),
    "guitool": frozenset({"cmd"}),
    "hook": frozenset({"command"}),
    "imap": frozenset({"tunnel"}),
    "instaweb": frozenset({"httpd", "browser"}),
    "interactive": frozenset({"difffilter"}),
    "lfs": frozenset(),
    "man": frozenset({"cmd", "path"}),
    "merge": frozenset({"driver"}),
    "mergetool": frozenset({"cmd", "path"}),
    "pager": frozenset(),
    "remote": frozenset({"uploadpack", "receivepack", "vcs", "url", "pushurl"}),
    "sendemail": frozenset(),
    "sequence": frozenset({"editor"}),
    "submodule": frozenset({"update", "url"}),
    "svn": frozenset({"authorsprog", "authors-prog"}),
    "tar": frozenset({"command"}),
    "trailer": frozenset({"command", "cmd"}),
    "uploadpack": frozenset({"packobjectshook"}),
}
#: For these keys, only values with one of these prefixes are commands. An alias may begin with `-c`.
MARKED: dict[tuple[str, str], tuple[str, ...]] = {
    ("alias", ""): ("!", "-"),
    ("submodule", "update"): ("!",),
    ("submodule", "url"): ("ext::",),
    ("remote", "url"): ("ext::",),
    ("remote", "pushurl"): ("ext::",),
}
#: Sections of Mercurial's and Sapling's configuration whose values are commands or Python files.
HG_SECTIONS = frozenset(
    {
        "hooks",
        "extensions",
        "alias",
        "merge-tools",
        "ui",
        "extdiff",
        "encode",
        "decode",
        "fix",
        "diff-tools",
        "pager",
        "gpg",
        "email",
        "defaults",
        "extdata",
        "fsmonitor",
        "logtoprocess",
    }
)


#: The system-wide files that builds of git read.
SYSTEM = ("/etc/gitconfig", "/usr/local/etc/gitconfig")
#: How many repositories to follow.
MOST_REPOSITORIES = 1_000
#: Settings of git and related tools that name a directory of hooks.
HOOK_DIRECTORIES = ("core.hookspath", "init.templatedir", "gitflow.path.hooks")


class Lead(NamedTuple):
    """A path that the host's configuration names, and a description of how."""

    path: str
    why: str
    #: Whether everything below it counts.
    tree: bool = False
    #: Whether the setting names a path, rather than a command that may contain one.
    sure: bool = False


class HookPaths(msgspec.Struct, frozen=True):
    """Every path in some directories that the host's version control is configured to run or read."""

    leads: tuple[Lead, ...] = ()
    #: By path in lower case, because some file systems ignore case: why the path counts.
    files: dict[str, str] = {}
    trees: dict[str, str] = {}
    #: The directories above the files and trees.
    above: dict[str, str] = {}
    #: The length of the longest path in `trees`.
    longest: int = -1
    #: Configuration that was not read, each with the reason: it may name any path.
    unread: tuple[str, ...] = ()

    def why(self, path: str, *, link: bool) -> str:
        """Return why a changed path counts; "" if it does not.

        A link that replaces a directory on the way leads the tool elsewhere, so it counts too.
        """
        low = path.lower()
        outermost = ""
        for place in dirwalk.beginnings(low, self.longest):
            outermost = self.trees.get(place, outermost)
        return outermost or self.files.get(low, "") or (self.above.get(low, "") if link else "")


def hook_paths(searched: RepositorySearch, environ: Mapping[str, str], home: str) -> HookPaths:
    """Read the host's configuration that applies in the searched directories."""
    follower = _Follower(searched, environ, home)
    return index_leads(sorted(set(follower.leads()), reverse=True), follower.unread)


def index_leads(leads: Sequence[Lead], unread: Mapping[str, str]) -> HookPaths:
    """Return the leads, indexed for lookups."""
    return HookPaths(
        leads=tuple(leads),
        files={lead.path.lower(): lead.why for lead in leads if not lead.tree},
        trees={lead.path.lower(): lead.why for lead in leads if lead.tree},
        above={place: lead.why for lead in leads for place in dirwalk.parents(lead.path.lower())},
        longest=max((len(lead.path.lower()) for lead in leads if lead.tree), default=-1),
        unread=tuple(f"{path}: {what}" for path, what in unread.items()),
    )


def repositories(tree: str, near: Iterable[str], *, everywhere: bool) -> RepositorySearch:
    """Find the repositories in a workspace: in its directories `near`, and with `everywhere` all others.

    `cut` says that a limit was reached, or that a directory of the caller's is unreadable.
    """
    tops = (f"{tree}/{place}".rstrip("/") for place in near)
    found = dict.fromkeys(
        path for top in tops for name in REPOSITORIES if os.path.lexists(path := f"{top}/{name}")
    )
    pending = [tree] if everywhere else []
    directories, entries, names, cut = MOST_DIRECTORIES, MOST_ENTRIES, len(tree), ""
    inodes, room = dict[str, int](), MOST_NAMES
    while pending:
        place = pending.pop()
        names -= len(place)
        directories -= 1
        try:
            with os.scandir(place) as listed:
                for entry in listed:
                    entries -= 1
                    if is_repository(entry.name):
                        found[entry.path] = None
                    elif entry.is_dir(follow_symlinks=False):
                        names += len(entry.path)
                        pending.append(entry.path)
                        room -= len(entry.path)
                        if room > 0:
                            inodes[entry.path] = entry.inode()
                    if entries < 0 or names > MOST_NAMES:
                        break
        except OSError as error:
            cut = cut or _describe_unreadable(place, error)
        if entries < 0 or names > MOST_NAMES or (directories <= 0 and pending):
            cut = f"{tree} has too many files to search them all for repositories"
            break
    return RepositorySearch(trees=(tree,), found=tuple(found), inodes=inodes, cut=cut)


def _describe_unreadable(place: str, error: OSError) -> str:
    """Describe an unreadable directory if the caller owns it. Nor can git enter those of other users."""
    try:
        own = os.lstat(place).st_uid == os.geteuid()
    except OSError:  # it has disappeared, or a directory above it is unreadable
        return ""
    return f"{place} cannot be searched for repositories: {error.strerror}" if own else ""


class _Follower:
    """Reads the files that the host's tools would read, each once."""

    def __init__(self, searched: RepositorySearch, environ: Mapping[str, str], home: str) -> None:
        self._searched = searched
        self._environ, self._home = environ, home
        shared = environ.get("XDG_CONFIG_HOME", "")
        self._config = shared if shared.startswith("/") else f"{home}/.config"
        self._files, self._bytes, self._hook_files = MOST_FILES, MOST_BYTES, MOST_HOOKS
        #: Every configuration file, and whether it exists.
        self._sources: dict[str, bool] = {}
        self.unread: dict[str, str] = {}
        # The same values apply in every repository.
        self._on_the_way = functools.cache(names_on_the_way)
        self._names = functools.cache(self._names_in)

    def leads(self) -> Iterator[Lead]:
        # The nearest first: repositories that a program makes further down cannot displace those above.
        found = [path for tree in self._searched.trees for path in self._above(tree)]
        # A bare repository below arrived together with the files around it.
        found += (path for path in self._searched.found if is_repository(os.path.basename(path)))
        found = list(dict.fromkeys(found))
        if len(found) > MOST_REPOSITORIES:
            trees = ", ".join(self._searched.trees)
            self.unread[trees] = (
                f"there are more than {MOST_REPOSITORIES} repositories, too many to check where all their "
                "hooks lead"
            )
        shared = list(self._settings(self._git_files()))
        own_hg = list(self._ini(self._hg_files()))
        own_jj = list(self._toml(self._jj_files()))
        # Relative paths count from a repository; without one, they lead nowhere.
        yield from self._git(shared, "")
        yield from self._commands(own_hg + own_jj, "")
        for path in found[:MOST_REPOSITORIES]:
            root, name = os.path.split(path)
            if name.lower() in (".hg", ".sl"):
                yield from self._commands([*own_hg, *self._ini(self._hg_of(path))], root)
            elif name.lower() == ".jj":
                files = [f"{path}/repo/config.toml", f"{pointer(f'{path}/repo')}/config.toml"]
                yield from self._commands([*own_jj, *self._toml(files)], root)
            else:
                yield from self._repository(path, shared)
        for path, exists in self._sources.items():
            linked = self._on_the_way(path) != (path,)
            yield from self._leads_inside(
                path, "version control reads it as configuration", sure=exists or linked
            )

    def _above(self, tree: str) -> list[str]:
        """Return the repositories above a directory, where tools look for one, and itself if it is bare."""
        found, place = list[str](), os.path.dirname(tree)
        while True:
            found += [f"{place}/{name}" for name in REPOSITORIES if os.path.lexists(f"{place}/{name}")]
            if place == os.path.dirname(place):
                break
            place = os.path.dirname(place)
        if all(os.path.lexists(f"{tree}/{name}") for name in BARE):
            found.append(tree)
        return found

    def _repository(self, path: str, shared: list[tuple[Setting, str]]) -> Iterator[Lead]:
        """Yield the paths that a git repository leads to, by its configuration or by links among hooks."""
        bare = os.path.basename(path).lower() != ".git"
        root = path if bare else os.path.dirname(path)
        inner, common = path, ""
        if text := pointer(path):
            inner = self._normalize(os.path.join(root, text.removeprefix("gitdir:").strip()))
        if text := pointer(f"{inner}/commondir"):
            common = self._normalize(os.path.join(inner, text))
        common = common or inner
        own = list(self._settings([f"{common}/config", f"{inner}/config.worktree"]))
        roots = {root, *(os.path.join(inner, one.value) for one, _ in own if one.name == "core.worktree")}
        for place in roots:
            yield from self._git([*shared, *own], place)
        yield from self._hooks(f"{common}/hooks", f"{common}/hooks leads here")

    def _git(self, settings: list[tuple[Setting, str]], root: str) -> Iterator[Lead]:
        """Yield the paths that settings lead to for a working tree at `root`."""
        for one, source in settings:
            why = f"{one.name} of {source} points here"
            if one.name in HOOK_DIRECTORIES:
                place = os.path.join(root, self._expand_home(one.value))
                yield from self._hooks(place, why)
                if os.path.basename(os.path.normpath(place)) == "_":  # husky's: runs the files beside it
                    beside = os.path.dirname(os.path.normpath(place))
                    yield from self._leads_inside(beside, why, tree=True, sure=True)
            elif _is_include(one):
                place = os.path.join(os.path.dirname(source), self._expand_home(one.value))
                yield from self._leads_inside(place, why, sure=True)
            elif _is_command(one):
                yield from self._words(one.value, why, root)

    def _hooks(self, place: str, why: str) -> Iterator[Lead]:
        """Yield a directory of hooks if it is in the workspace, and the targets of links in it."""
        if "\0" in place or not place.startswith("/"):
            return
        if os.path.basename(os.path.dirname(place)).lower() != ".git" or self._on_the_way(place) != (place,):
            yield from self._leads_inside(place, why, tree=True, sure=True)
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    self._hook_files -= 1
                    if self._hook_files < 0:
                        self.unread[place] = "there are too many files to check where all hooks lead"
                        return
                    if entry.is_symlink():
                        leads = f"{entry.path} leads here"
                        yield from self._leads_inside(entry.path, leads, literal=False, sure=True)
        except OSError:
            return

    def _commands(self, values: Iterable[tuple[str, str, str]], root: str) -> Iterator[Lead]:
        for name, value, source in values:
            why = f"{name} of {source} points here"
            yield from self._words(value, why, root)
            if name.startswith("extensions.") and value.strip():  # a file or a package of Python
                yield from self._leads_inside(
                    os.path.join(root, self._expand_home(value.strip())), why, tree=True
                )

    def _words(self, command: str, why: str, root: str) -> Iterator[Lead]:
        """Yield the files that a command names; it runs at `root`."""
        if len(command) > LONGEST_COMMAND:
            self.unread[why.removesuffix(" points here")] = "the command is too long to check"
            return
        for name in self._names(command):
            # Includes the rest of a path after a variable or $(git rev-parse --show-toplevel).
            for place in {os.path.join(root, name), os.path.join(root, name.lstrip("/"))}:
                if not place.startswith("/") or os.path.isdir(place):
                    continue
                if "/" in name or os.path.islink(place):
                    yield from self._leads_inside(place, why)
                elif self._is_ours(place):
                    yield Lead(place, why)

    def _names_in(self, command: str) -> list[str]:
        """Return the words of a command that may be file names."""
        words = _WORDS.findall(command)
        with contextlib.suppress(ValueError):  # an unclosed quote
            words += shlex.split(command)
        # python:hooks/check.py:function, as Mercurial writes it
        parts = {part for word in words for part in (word, *word.split(":"))}
        # An option may have its value attached: ssh -Ftools/config.
        parts |= {part[2:] for part in parts if part[:1] == "-" and part[1:2].isalpha()}
        # A first word without a slash is looked up in PATH.
        parts -= {words[0]} if words and "/" not in words[0] else set()
        names = {self._expand_home(part.lstrip("!")) for part in parts if "\0" not in part}
        return sorted(name for name in names if name and not name.startswith("-"))

    def _is_ours(self, path: str) -> bool:
        return any(path.startswith(top + "/") for top in self._searched.trees)

    def _leads_inside(
        self, path: str, why: str, *, tree: bool = False, literal: bool = True, sure: bool = False
    ) -> Iterator[Lead]:
        """Yield the path as written, every link on the way and its end, as far as they are in the trees."""
        if "\0" in path or not path.startswith("/"):
            return
        written = os.path.normpath(path)
        for name in {written, *self._on_the_way(path)}:
            if (literal or name != written) and self._is_ours(name):
                yield Lead(name, why, tree, sure)

    def _normalize(self, path: str) -> str:
        """Normalize a path without links; leave one with links as it is, for a later lookup of each link."""
        if "\0" in path or not path.startswith("/"):
            return path
        names = self._on_the_way(path)
        return names[0] if len(names) == 1 else path

    def _expand_home(self, value: str) -> str:
        """Expand the ~ of a path as git does."""
        if value == "~" or value.startswith("~/"):
            return self._home + value[1:]
        return os.path.expanduser(value) if value.startswith("~") and "\0" not in value else value

    def _content(self, path: str) -> bytes | None:
        most = min(LARGEST, self._bytes) if self._files else 0
        data = small(path, most)
        if path.startswith("/") and "\0" not in path:
            self._sources[path] = os.path.lexists(path)
        if data is not None:
            self._files -= 1
            self._bytes -= len(data)
        elif os.path.isfile(path):
            self.unread[path] = "not checked for where hooks lead: unreadable or too large"
        return data

    def _contents(self, pending: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each file once with its content, the last first. The caller appends included files."""
        seen = set[str]()
        while pending:
            path = pending.pop()
            if path not in seen and (data := self._content(path)) is not None:
                seen.add(path)
                yield path, data

    def _git_files(self) -> list[str]:
        known = self._environ
        return [
            *([known["GIT_CONFIG_SYSTEM"]] if known.get("GIT_CONFIG_SYSTEM") else SYSTEM),
            *(
                [known["GIT_CONFIG_GLOBAL"]]
                if known.get("GIT_CONFIG_GLOBAL")
                else [f"{self._config}/git/config", f"{self._home}/.gitconfig"]
            ),
        ]

    def _settings(self, files: list[str]) -> Iterator[tuple[Setting, str]]:
        """Yield the settings of files and of their includes, whatever the condition, each with its file."""
        pending = files[::-1]
        for path, data in self._contents(pending):
            settings = parse(data)
            if len(settings) >= MOST_SETTINGS:
                self.unread[path] = "there are too many settings to check all of them"
            for one in settings:
                yield one, path
                if _is_include(one):
                    pending.append(os.path.join(os.path.dirname(path), self._expand_home(one.value)))

    def _hg_files(self) -> list[str]:
        if "HGRCPATH" in self._environ:
            named = filter(None, self._environ["HGRCPATH"].split(":"))
            return [file for path in named for file in (path, *_files_ending(path, ".rc"))]
        return [
            "/etc/mercurial/hgrc",
            *_files_ending("/etc/mercurial/hgrc.d", ".rc"),
            f"{self._home}/.hgrc",
            f"{self._config}/hg/hgrc",
            f"{self._config}/sapling/sapling.conf",
            f"{self._home}/.sapling/sapling.conf",
        ]

    def _hg_of(self, path: str) -> list[str]:
        shared = pointer(f"{path}/sharedpath")
        places = [path, *([os.path.join(path, shared)] if shared else ())]
        return [f"{place}/{name}" for place in places for name in ("hgrc", "hgrc-not-shared", "config")]

    def _ini(self, files: list[str]) -> Iterator[tuple[str, str, str]]:
        """Yield the values that Mercurial executes: name, value, file."""
        pending = files[::-1]
        for path, data in self._contents(pending):
            section = name = ""
            for line in os.fsdecode(data).splitlines():
                text = line.strip()
                if text.startswith("%include "):
                    place = os.path.join(os.path.dirname(path), self._expand_home(text[9:].strip()))
                    pending.append(place)
                    yield "%include", place, path
                elif text.startswith("[") and not line[:1].isspace():
                    section = text[1:].partition("]")[0]
                elif text and text[0] not in "#;" and section in HG_SECTIONS:
                    if not line[:1].isspace():
                        name = text.partition("=")[0].strip()
                    yield f"{section}.{name}", text if line[:1].isspace() else text.partition("=")[2], path

    def _jj_files(self) -> list[str]:
        if self._environ.get("JJ_CONFIG"):
            return self._environ["JJ_CONFIG"].split(":")
        place = f"{self._config}/jj"
        own = [f"{place}/repos/{name}/config.toml" for name in _names(f"{place}/repos")]
        return [
            f"{self._home}/.jjconfig.toml",
            f"{place}/config.toml",
            *_files_ending(f"{place}/conf.d", ".toml"),
            *own,
        ]

    def _toml(self, files: list[str]) -> Iterator[tuple[str, str, str]]:
        import tomllib

        for path in files:
            if (data := self._content(path)) is not None:
                try:
                    table = tomllib.loads(data.decode("utf-8", "replace"))
                except (tomllib.TOMLDecodeError, RecursionError):
                    continue
                for name, value in _strings(table, ""):
                    yield name, value, path


def _is_command(one: Setting) -> bool:
    """Return whether git executes the value."""
    keys = COMMANDS.get(one.section)
    if keys is None or (keys and one.key not in keys):
        return False
    return one.value.startswith(MARKED.get((one.section, one.key if keys else ""), ""))


def _is_include(one: Setting) -> bool:
    return one.section in ("include", "includeif") and one.key == "path"


def _strings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, name)


def _names(place: str) -> list[str]:
    try:
        return sorted(os.listdir(place))
    except OSError:
        return []


def _files_ending(place: str, ending: str) -> list[str]:
    return [f"{place}/{name}" for name in _names(place) if name.endswith(ending)]
