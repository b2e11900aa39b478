"""From a command to the install that it belongs to.

The command is looked up as the user's own shell would, shims are resolved,
links are followed one by one, and the result is shown read-only: the prefix of
the install that it belongs to, or the one file; never the directory around it.
Links on the way are made again inside, so that their directories need not be
shown either.

Two kinds of names lead there. The user's own (PATH, a path on the command
line) may lead anywhere except to a home, a place of secrets or Stockade's own
files. Names in a tree that the policy shows (a link, a `pyvenv.cfg`, the first
line of a script) are untrusted: they may only lead to an install of the user,
in a place for installs and with the layout of one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from stockade.errors import PolicyError
from stockade.resolve.resolved import UnnamedTrees
from stockade.resolve.toolchain import installs, shims
from stockade.resolve.toolchain.installs import InstallRoot
from stockade.resolve.toolchain.needs import (
    PROJECT,
    PYTHON,
    SYSTEM_PROGRAMS,
    Surroundings,
    Toolchain,
    is_plain,
    which,
)

MOST_LINKS = 40
#: The targets of links there depend on the process that reads them: inside they would differ.
PROCESS_DEPENDENT = ("/proc/", "/dev/", "/sys/")
MOST_INTERPRETERS = 4


class _LinkChain:
    """The links from a command to what it needs; they are made inside only if that may be shown."""

    def __init__(self, name: str, trusted: bool) -> None:
        self.name = name
        self.trusted = trusted
        self.links: dict[str, str] = {}


class _DeadEnd(Exception):
    """The links lead to something that must not be shown."""


class ProgramSearch:
    """Searches for what must be shown so that commands work."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._known: list[InstallRoot] | None = None
        self.trees: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.path: list[str] = []
        self.path_after: list[str] = []
        self._used: set[str] = set()

    def command(self, name: str, *, trusted: bool = True, depth: int = 0) -> bool:
        """Find what a command needs; False if the user has no such command."""
        around, without = self._around, ""
        while True:
            if "/" in name:
                if name.startswith(SYSTEM_PROGRAMS) and is_plain(name):
                    return True
                found, own = os.path.join(around.cwd, name), True
                if not installs.is_program(found):
                    return False
            else:
                found, own = which(name, around.search, around.caller_cwd, without=without)
                if not found:
                    return self.project_environment(name)
                # The usual case, which must be fast.
                if os.path.dirname(found) in around.path and is_plain(found):
                    return True
            chain = _LinkChain(name, trusted and own)
            try:
                hop = self._step(found, chain, quiet="/" not in name)
                behind = shims.through(hop, around.cwd, around.environ, around.home)
                if behind is None and not without and "/" not in name:
                    without = os.path.dirname(found)
                    continue
                if behind is not None and behind != hop:
                    if "/" in name and not self._is_shown(hop):
                        chain.links[hop] = behind
                    hop = self._step(behind, chain)
                self._follow(hop, chain, depth)
            except _DeadEnd:
                return True
            self.links |= chain.links
            directory = os.path.dirname(hop)
            if "/" not in name:
                self._add_to_path(directory)
            return True

    def result(self) -> Toolchain:
        """What the search has found so far."""
        used = (*self.trees, *self._used)
        private = [path for tree in self.trees for path in installs.private_paths(tree, used)]
        hidden = tuple(path for path in dict.fromkeys(private) if os.path.lexists(path))
        return Toolchain(self.trees, self.links, tuple(self.path), tuple(self.path_after), hidden)

    def environments(self, unnamed: UnnamedTrees) -> None:
        """Make the user's Python findable, and the programs of the project's own environment."""
        before = self.trees.copy(), self.links.copy(), self.path.copy(), self.path_after.copy(), {*self._used}
        with contextlib.suppress(PolicyError):  # of a version manager: the user has not asked for a Python
            self.command(PYTHON)
        self.project_environment(PYTHON)
        if self.trees != before[0] and not unnamed.take(self.result().hidden):
            self.trees, self.links, self.path, self.path_after, self._used = before

    def project_environment(self, name: str) -> bool:
        """Make the programs of the project's own environment findable; False if it has none of that name.

        They come after all others: a repository that has made them must not replace programs of the user.
        """
        venv = f"{self._around.project}/{PROJECT}"
        if not self._around.project or not installs.is_venv(venv):
            return False
        chain = _LinkChain(PROJECT, False)
        with contextlib.suppress(_DeadEnd):
            hop = self._step(f"{venv}/bin/{PYTHON}", chain)
            self._follow(hop, chain, 0)
            self.links |= chain.links
            if self._is_shown(directory := os.path.dirname(hop)) and ":" not in directory:
                self.path_after = [directory]
        return installs.is_program(f"{venv}/bin/{name}")

    def search_whole_path(self) -> None:
        """Add every visible directory of the user's PATH to the PATH inside."""
        around = self._around
        for entry in around.search.split(":"):
            real = os.path.realpath(entry) if entry.startswith("/") else ""
            if not real or not self._is_shown(real):
                continue
            for directory in (*shims.behind(real, around.cwd, around.environ), real):
                if self._is_shown(directory):
                    self._add_to_path(directory)

    def _add_to_path(self, directory: str) -> None:
        # A name with a colon cannot be part of a PATH.
        if ":" not in directory and directory not in (*self.path, *self._around.path):
            self.path.append(directory)

    def _follow(self, hop: str, chain: _LinkChain, depth: int) -> None:
        """Show what is needed to execute a path whose directory has its real name."""
        for _ in range(MOST_LINKS):
            self._used.add(hop)
            if not self._is_shown(hop):
                self._show_install(hop, chain)
            elif _in(venv := os.path.dirname(os.path.dirname(hop)), self._around.granted):
                self._show_base(venv, chain)
            target = self._link(hop, chain)
            if target is None:
                break
            hop = self._step(os.path.join(os.path.dirname(hop), target), chain)
        else:
            raise _DeadEnd
        if not self._is_shown(hop):
            if not (chain.trusted and installs.is_program(hop) and self._is_fit(hop)):
                raise _DeadEnd
            self.trees[hop] = chain.name
            self._show_user_site(hop, chain)
        self._interpreter(hop, chain, depth)

    def _step(self, path: str, chain: _LinkChain, *, quiet: bool = False) -> str:
        """Replace a path's directory by its real name; links on the way join the chain unless `quiet`."""
        if "\0" in path:
            raise _DeadEnd
        todo = [part for part in os.path.dirname(path).split("/") if part][::-1]
        at, left = "", MOST_LINKS
        while todo:
            part = todo.pop()
            if part in (".", ""):
                continue
            if part == "..":
                at = os.path.dirname(at) if at else ""
                continue
            at = f"{at}/{part}"
            target = self._link(at, chain, record=not quiet)
            if target is None:
                continue
            left -= 1
            if not left:
                raise _DeadEnd
            at = "" if target.startswith("/") else os.path.dirname(at).rstrip("/")
            todo += [part for part in target.split("/") if part][::-1]
        return f"{at}/{os.path.basename(path)}"

    def _link(self, path: str, chain: _LinkChain, *, record: bool = True) -> str | None:
        """The target of a link, or None. A link that others may have written makes the chain untrusted."""
        if path.startswith(PROCESS_DEPENDENT):
            raise _DeadEnd
        try:
            info = os.lstat(path)
            if not stat.S_ISLNK(info.st_mode):
                return None
            target = os.readlink(path)
        except OSError:
            return None
        if info.st_uid not in (0, self._around.uid) or self._is_strange(path):
            chain.trusted = False
        if record and not self._is_shown(path):
            chain.links[path] = target
        return target

    def _show_install(self, path: str, chain: _LinkChain) -> None:
        """Show the install that a program belongs to, if one is recognised."""
        prefix = self._prefix(path, chain.trusted)
        if not prefix:
            return
        self.trees[prefix] = chain.name
        self._show_base(prefix, chain)

    def _show_base(self, venv: str, chain: _LinkChain) -> None:
        """Show the Python that a virtual environment was made from, as its pyvenv.cfg says."""
        if not installs.is_venv(venv):
            return
        trusted = chain.trusted and not self._is_strange(venv)
        text = shims.first_bytes(f"{venv}/pyvenv.cfg").decode("utf-8", "surrogateescape")
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home" and value.strip().startswith("/"):
                way = _LinkChain(chain.name, trusted)
                try:
                    base = self._step(f"{value.strip()}/python3", way)
                    if not self._is_shown(base):
                        prefix = self._prefix(base, way.trusted, laid_out=True)
                        if not prefix:
                            return
                        self.trees[prefix] = chain.name
                    self.links |= way.links
                except _DeadEnd:
                    pass
                return

    def _prefix(self, path: str, trusted: bool, *, laid_out: bool = False) -> str:
        """The directory of the install that a program belongs to; empty if it must not be shown."""
        if whole := next((tree for tree in installs.WHOLE if _in(path, (tree,))), ""):
            return whole
        install = next(
            (directory for directory in installs.above(path) if installs.is_install(directory)), ""
        )
        if install:
            return self._if_fit(install) if trusted or self._is_own(install) else ""
        if laid_out or not trusted:
            return ""
        if install := self._managed_install(path):
            return self._if_fit(install)
        # A package of Node needs the packages beside it.
        before, packages, _ = path.partition("/node_modules/")
        return self._if_fit(f"{before}/node_modules") if packages else ""

    def _if_fit(self, prefix: str) -> str:
        return prefix if self._is_fit(prefix) else ""

    def _managed_install(self, path: str) -> str:
        """The install that a path lies in, if it lies where version managers put theirs; else empty."""
        return next((found for place in self._places if (found := place.prefix(path))), "")

    def _is_own(self, prefix: str) -> bool:
        """Whether it is an install of the user: in a place for installs, or in the PATH."""
        return bool(self._managed_install(f"{prefix}/bin")) or self._is_on_path(prefix)

    def _is_on_path(self, prefix: str) -> bool:
        """Whether the user's own PATH leads to it."""
        entries = self._around.search.split(":")
        own = [entry for entry in entries if entry.startswith("/") and not self._is_strange(entry)]
        return any(os.path.realpath(entry) == f"{prefix}/bin" for entry in own)

    def _show_user_site(self, path: str, chain: _LinkChain) -> None:
        """Show the packages that a script of `pip install --user` in ~/.local/bin needs."""
        lib = f"{self._around.home}/.local/lib"
        if os.path.dirname(path) != f"{self._around.home}/.local/bin" or b"python" not in _first_line(path):
            return
        for name in os.listdir(lib) if os.path.isdir(lib) else ():
            packages = f"{lib}/{name}/site-packages"
            if name.startswith("python3") and os.path.realpath(packages) == packages:
                self.trees[packages] = chain.name

    def _interpreter(self, path: str, chain: _LinkChain, depth: int) -> None:
        """Show the interpreter that the first line of a script names."""
        if path.startswith(SYSTEM_PROGRAMS) or depth >= MOST_INTERPRETERS:
            return
        words = _first_line(path)[2:].decode("utf-8", "surrogateescape").split()
        if not words:
            return
        trusted = chain.trusted and not self._is_strange(path)
        if os.path.basename(words[0]) == "env":
            names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            if names and "/" not in names[0]:
                self.command(names[0], trusted=trusted, depth=depth + 1)
        elif words[0].startswith("/"):
            way = _LinkChain(chain.name, trusted)
            try:
                self._follow(self._step(words[0], way), way, depth + 1)
            except _DeadEnd:
                return
            self.links |= way.links

    def _is_shown(self, path: str) -> bool:
        return _in(path, (*self._around.shown, *self._around.granted, *self.trees))

    def _is_strange(self, path: str) -> bool:
        """Whether another user, or a program, may have written it."""
        if _in(path, self._around.granted):
            return True
        try:
            mode = os.stat(os.path.dirname(path)).st_mode
        except OSError:
            return True
        return bool(mode & stat.S_IWOTH)

    def _is_fit(self, path: str) -> bool:
        """Whether it may be shown without a clause: no home, no place of secrets, no files of Stockade."""
        home = self._around.home
        if path.count("/") < 2 or _in(home, (path,)):
            return False
        secrets = [f"{home}/{name}" for name in installs.SECRETS]
        for place in (*secrets, *self._around.own):
            if _in(place, (path,)) or _in(path, (place,)):
                return False
        return not installs.looks_like_home(path)

    @property
    def _places(self) -> list[InstallRoot]:
        if self._known is None:
            self._known = installs.places(self._around.home, self._around.environ)
        return self._known


def _in(path: str, trees: Iterable[str]) -> bool:
    return any(path == tree or path.startswith(f"{tree}/") for tree in trees)


def _first_line(path: str) -> bytes:
    """The first line of a script up to a NUL byte; empty for any other file."""
    head = shims.first_bytes(path, 256)
    return head.partition(b"\n")[0].partition(b"\0")[0] if head.startswith(b"#!") else b""
