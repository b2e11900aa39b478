"""From a command to the install that it belongs to.

The command is looked up as the caller's own shell would, shims are seen
through, links are followed one by one, and what is found is shown read-only:
the prefix of the install that it belongs to, or the one file; never the
directory around it. Links on the way are made again inside, so that their
directories need not be shown either.

Two kinds of words lead there. The caller's own (PATH, a path that was typed)
may lead anywhere that is not a home, a place of secrets or Stockade's own.
Those of a tree that the policy shows (a link, a `pyvenv.cfg`, a first line
in the workspace) are a stranger's: they may only lead to an install that the
caller has where installs are kept, laid out like one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from stockade.policy import installs, shims
from stockade.policy.installs import Place
from stockade.policy.toolchain import SYSTEM_PROGRAMS, Surroundings, Toolchain, is_plain, which

MOST_LINKS = 40
#: What a link says there depends on who asks: inside it would be another.
OTHERWORLDLY = ("/proc/", "/dev/", "/sys/")
MOST_INTERPRETERS = 4


class _Chain:
    """One way from a command to what it needs. What is on it counts only if it leads there."""

    def __init__(self, name: str, trusted: bool) -> None:
        self.name = name
        self.trusted = trusted
        self.links: dict[str, str] = {}


class _Dead(Exception):
    """The way leads nowhere that may be shown."""


class Search:
    """The way from commands to what is to be shown."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._known: list[Place] | None = None
        self.trees: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.path: list[str] = []
        self._used: set[str] = set()

    def command(self, name: str, *, trusted: bool = True, depth: int = 0) -> bool:
        """Show what a command needs. False if the caller has no such command."""
        around, without = self._around, ""
        while True:
            if "/" in name:
                if name.startswith(SYSTEM_PROGRAMS) and is_plain(name):
                    return True
                found, own = os.path.join(around.cwd, name), True
                if not installs.is_program(found):
                    return False
            else:
                path = around.environ.get("PATH", os.defpath)
                found, own = which(name, path, around.caller_cwd, without=without)
                if not found:
                    return False
                # The everyday case, and it must cost nothing.
                if os.path.dirname(found) in around.path and is_plain(found):
                    return True
            chain = _Chain(name, trusted and own)
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
            except _Dead:
                return True
            self.links |= chain.links
            directory = os.path.dirname(hop)
            if "/" not in name:
                self._search(directory)
            return True

    def found(self) -> Toolchain:
        """What was found so far."""
        used = (*self.trees, *self._used)
        kept = [path for tree in self.trees for path in installs.private(tree, used)]
        hidden = tuple(path for path in dict.fromkeys(kept) if os.path.lexists(path))
        return Toolchain(self.trees, self.links, tuple(self.path), hidden)

    def whole_path(self) -> None:
        """Search whatever the caller searches, as far as it is shown."""
        around = self._around
        for entry in around.environ.get("PATH", "").split(":"):
            real = os.path.realpath(entry) if entry.startswith("/") else ""
            if not real or not self._is_shown(real):
                continue
            for directory in (*shims.behind(real, around.cwd, around.environ), real):
                if self._is_shown(directory):
                    self._search(directory)

    def _search(self, directory: str) -> None:
        # One with a colon in its name cannot be written into a PATH.
        if ":" not in directory and directory not in (*self.path, *self._around.path):
            self.path.append(directory)

    def _follow(self, hop: str, chain: _Chain, depth: int) -> None:
        """Show what it takes to execute a path whose directory is real."""
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
            raise _Dead
        if not self._is_shown(hop):
            if not (chain.trusted and installs.is_program(hop) and self._is_fit(hop)):
                raise _Dead
            self.trees[hop] = chain.name
            self._show_user_site(hop, chain)
        self._interpreter(hop, chain, depth)

    def _step(self, path: str, chain: _Chain, *, quiet: bool = False) -> str:
        """The path with its directory made real. Links on the way belong to the chain, unless `quiet`."""
        if "\0" in path:
            raise _Dead
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
                raise _Dead
            at = "" if target.startswith("/") else os.path.dirname(at).rstrip("/")
            todo += [part for part in target.split("/") if part][::-1]
        return f"{at}/{os.path.basename(path)}"

    def _link(self, path: str, chain: _Chain, *, record: bool = True) -> str | None:
        """Where a link leads, or None. Whose word it is decides about the rest of the chain."""
        if path.startswith(OTHERWORLDLY):
            raise _Dead
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

    def _show_install(self, path: str, chain: _Chain) -> None:
        """Show the install that a program belongs to, if it can be told."""
        prefix = self._prefix(path, chain.trusted)
        if not prefix:
            return
        self.trees[prefix] = chain.name
        self._show_base(prefix, chain)

    def _show_base(self, venv: str, chain: _Chain) -> None:
        """The Python that a virtual environment was made from: where its pyvenv.cfg says."""
        if not installs.is_venv(venv):
            return
        trusted = chain.trusted and not self._is_strange(venv)
        text = shims.first_bytes(f"{venv}/pyvenv.cfg").decode("utf-8", "surrogateescape")
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home" and value.strip().startswith("/"):
                way = _Chain(chain.name, trusted)
                try:
                    base = self._step(f"{value.strip()}/python3", way)
                    if not self._is_shown(base):
                        prefix = self._prefix(base, way.trusted, laid_out=True)
                        if not prefix:
                            return
                        self.trees[prefix] = chain.name
                    self.links |= way.links
                except _Dead:
                    pass
                return

    def _prefix(self, path: str, trusted: bool, *, laid_out: bool = False) -> str:
        """The directory of the install that a program is part of, if that may be shown."""
        if whole := next((tree for tree in installs.WHOLE if _in(path, (tree,))), ""):
            return whole
        laid = next((directory for directory in installs.above(path) if installs.is_install(directory)), "")
        if laid:
            return self._fitting(laid) if trusted or self._is_own(laid) else ""
        if laid_out or not trusted:
            return ""
        if kept := self._kept(path):
            return self._fitting(kept)
        # A package of Node's needs those beside it.
        before, found, _ = path.partition("/node_modules/")
        return self._fitting(f"{before}/node_modules") if found else ""

    def _fitting(self, prefix: str) -> str:
        return prefix if self._is_fit(prefix) else ""

    def _kept(self, path: str) -> str:
        """The install that a path is in, by where the caller's version managers put theirs."""
        return next((found for place in self._places if (found := place.prefix(path))), "")

    def _is_own(self, prefix: str) -> bool:
        """Whether the caller has it as an install: where those are kept, or in the PATH."""
        return bool(self._kept(f"{prefix}/bin")) or self._is_on_path(prefix)

    def _is_on_path(self, prefix: str) -> bool:
        """Whether the caller's own PATH leads to it."""
        entries = self._around.environ.get("PATH", "").split(":")
        own = [entry for entry in entries if entry.startswith("/") and not self._is_strange(entry)]
        return any(os.path.realpath(entry) == f"{prefix}/bin" for entry in own)

    def _show_user_site(self, path: str, chain: _Chain) -> None:
        """What `pip install --user` puts into ~/.local/bin needs the packages beside it."""
        lib = f"{self._around.home}/.local/lib"
        if os.path.dirname(path) != f"{self._around.home}/.local/bin" or b"python" not in _first_line(path):
            return
        for name in os.listdir(lib) if os.path.isdir(lib) else ():
            packages = f"{lib}/{name}/site-packages"
            if name.startswith("python3") and os.path.realpath(packages) == packages:
                self.trees[packages] = chain.name

    def _interpreter(self, path: str, chain: _Chain, depth: int) -> None:
        """Show what the first line of a script names."""
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
            way = _Chain(chain.name, trusted)
            try:
                self._follow(self._step(words[0], way), way, depth + 1)
            except _Dead:
                return
            self.links |= way.links

    def _is_shown(self, path: str) -> bool:
        return _in(path, (*self._around.shown, *self._around.granted, *self.trees))

    def _is_strange(self, path: str) -> bool:
        """Whether somebody else than the caller may have written it."""
        if _in(path, self._around.granted):
            return True
        try:
            mode = os.stat(os.path.dirname(path)).st_mode
        except OSError:
            return True
        return bool(mode & stat.S_IWOTH)

    def _is_fit(self, path: str) -> bool:
        """Whether it may be shown unasked: no home, no place of secrets, nothing of Stockade's own."""
        home = self._around.home
        if path.count("/") < 2 or _in(home, (path,)):
            return False
        secrets = [f"{home}/{name}" for name in installs.SECRETS]
        for place in (*secrets, *self._around.own):
            if _in(place, (path,)) or _in(path, (place,)):
                return False
        return not installs.is_homely(path)

    @property
    def _places(self) -> list[Place]:
        if self._known is None:
            self._known = installs.places(self._around.home, self._around.environ)
        return self._known


def _in(path: str, trees: Iterable[str]) -> bool:
    return any(path == tree or path.startswith(f"{tree}/") for tree in trees)


def _first_line(path: str) -> bytes:
    """The first line of a script, empty if it is none. No path and no name goes on after a zero."""
    head = shims.first_bytes(path, 256)
    return head.partition(b"\n")[0].partition(b"\0")[0] if head.startswith(b"#!") else b""
