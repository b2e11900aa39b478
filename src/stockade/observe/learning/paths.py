"""The paths of the host that a program missed: what a policy must show, and what only the user can grant.

| what was refused | becomes |
|---|---|
| /proc, /sys, /dev | nothing: no policy can show them |
| a cache of a package manager | nothing: the program makes its own in the private home |
| settings in the home, a name that secrets have, a file that not everybody may read | a question |
| a file with a key, a token or a password in it | a question |
| /etc, but for names that every system has | a question |
| a name that a policy cannot write | a question |
| a device, a socket, a network file system | a question |
| writing outside the workspace | a question: such writes are real |
| a path in a tree that the profile `dev` shows | that tree |
| `FEW` or more paths in one directory without secrets | that directory |
| a directory that was listed | the directory if it has no secrets, or else a question |
| any other file | the file |

Every path is judged by its real name, so that a link cannot lead to a secret, and granted by its real name,
so that a link that changes later cannot either. A file that may be a secret is granted if the user agrees.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterable

import msgspec

from stockade.linux.path_lookup import covers
from stockade.linux.quiet_lookup import look_quietly, remote_devices
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.learning.lesson import Consent, LearnedEntry, LearnQuestion, by_programs, refuse
from stockade.observe.learning.secret_paths import SecretPlaces
from stockade.observe.records import is_compiled_python
from stockade.policy.profile import profile
from stockade.policy.values import literal, quote

#: From how many paths in one directory on it is granted as a whole.
FEW = 4
#: How many paths a learned policy grants, and how many questions are listed.
MOST_PATHS = 64
MOST_QUESTIONS = 32
#: How many directories are looked through for secrets.
MOST_TREES = 256
#: How many files are looked into for secrets.
MOST_FILES = 1000
#: How many accesses are looked at: a program can try as many as it likes.
MOST_ACCESSES = 20_000

#: Where the sandbox has something of its own, and no policy can show the host's.
OWN = ("/proc", "/sys", "/dev", "/run/stockade")
#: Below the home: caches, which a program fills again in the private home.
CACHES = (
    ".cache", ".npm", ".yarn", ".bun/install", ".gradle/caches", ".local/share/pnpm", ".node-gyp",
    "Library/Caches",
)  # fmt: skip
_READS = (Action.READ, Action.EXECUTE)
WRITES = (Action.WRITE, Action.CREATE, Action.REMOVE, Action.RENAME)


class MissingPath(msgspec.Struct):
    """A path of the host that was missing inside."""

    path: str
    is_dir: bool
    programs: set[str]
    files: int = 1


class LearnedPaths(msgspec.Struct, frozen=True):
    """What a policy must show, and what was left out."""

    read: tuple[LearnedEntry, ...] = ()
    #: Programs of the system that an `exec` clause does not list.
    programs: tuple[str, ...] = ()
    questions: tuple[LearnQuestion, ...] = ()
    #: Caches that the program fills itself, and paths that no policy can show.
    caches: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()


class PathLearner:
    """Sorts the file accesses that walls refused."""

    def __init__(
        self,
        places: SecretPlaces,
        workspace: str = "",
        system: Iterable[str] = (),
        ungrantable: Callable[[str], str] = lambda path: "",
        consent: Consent = refuse,
    ) -> None:
        self._places = places
        self._consent = consent
        #: Says why no policy can show a path; empty if one can.
        self._ungrantable = ungrantable
        self._workspace = workspace
        #: What the profile shows, by real names.
        self._system = tuple(system)
        self._remote = remote_devices()
        self._needs: dict[str, MissingPath] = {}
        self._programs: dict[str, None] = {}
        self._questions: dict[str, LearnQuestion] = {}
        self._caches: dict[str, None] = {}
        self._impossible: dict[str, None] = {}
        self._left = MOST_ACCESSES
        self._judged: dict[str, str] = {}
        self._searched: dict[str, str] = {}

    def add(self, refused: Iterable[Answer]) -> None:
        """Take in accesses that a wall refused."""
        for answer in refused:
            self._left -= 1
            if self._left < 0:
                self._ask("", "use more paths than are looked at", "the program tried too many")
                return
            if answer.access.action in _READS:
                self._take_read(answer.access)
            elif answer.access.action in WRITES:
                self._take_write(answer)

    def secret(self, path: str) -> str:
        """Say why a path may hold a secret, as `add` judges it; empty if nothing suggests it."""
        found = look_quietly(path, self._remote)
        return self._secret(found.name, found.mode)

    def _secret(self, real: str, mode: int) -> str:
        if self._known_tree(real):
            return ""
        if not stat.S_ISREG(mode):
            return self._places.secret(real, mode)
        if real not in self._searched:
            many = len(self._searched) >= MOST_FILES
            why = "the program tried too many files" if many else self._places.in_file(real, mode)
            self._searched[real] = why
        return self._searched[real]

    def learned(self) -> LearnedPaths:
        """Return what was found, with paths collapsed."""
        granted = self._collapsed()
        entries = [
            LearnedEntry(self._text(one.path), _reason(one))
            for one in sorted(granted, key=lambda one: one.path)
        ]
        if len(entries) > MOST_PATHS:
            self._ask(
                "",
                f"read {len(entries) - MOST_PATHS} more paths",
                f"a learned policy grants at most {MOST_PATHS}; show the directory that they are in",
            )
        return LearnedPaths(
            tuple(entries[:MOST_PATHS]),
            tuple(self._programs),
            tuple(self._questions.values()),
            tuple(self._caches),
            tuple(self._impossible),
        )

    def _take_read(self, access: Access) -> None:
        path = access.target
        if not path.startswith("/") or ".." in path.split("/"):
            return
        if any(covers(own, path) for own in OWN):
            _note(self._impossible, path)
            return
        found = look_quietly(path, self._remote)
        real = found.name
        if found.exists is False or any(covers(own, real) for own in OWN):
            return
        verb = "execute" if access.action is Action.EXECUTE else "read"
        if found.exists is None:
            self._ask(path, f"{verb} {path}", "it is behind a network file system, or you may not look there")
        elif self._workspace and covers(self._workspace, real):
            self._ask(real, f"{verb} {real}", "the policy hides it in the workspace: see deny")
        elif any(covers(tree, real) for tree in self._system):
            if access.action is Action.EXECUTE and len(self._programs) < MOST_PATHS:
                self._programs[real] = None
        elif cache := self._cache(real):
            _note(self._caches, cache)
        elif not (stat.S_ISREG(found.mode) or stat.S_ISDIR(found.mode)):
            self._ask(real, f"{verb} {real}", "it is neither a file nor a directory")
        elif (why := self._secret(real, found.mode)) and not (
            stat.S_ISREG(found.mode) and self._consent(f"{verb} {real}", why)
        ):
            self._ask(real, f"{verb} {real}", why, "read")
        elif not _can_be_written(real):
            self._ask(real, f"{verb} {real}", "a policy cannot write such a name")
        elif not stat.S_ISDIR(found.mode) and (why := self._ungrantable(real)):
            self._ask(real, f"{verb} {real}", why)
        else:
            need = self._needs.setdefault(real, MissingPath(real, stat.S_ISDIR(found.mode), set()))
            need.programs.add(access.program)

    def _take_write(self, answer: Answer) -> None:
        path = answer.access.other or answer.access.target
        if cache := self._cache(path):
            _note(self._caches, cache)
            return
        if is_compiled_python(answer.access):
            return
        verb = {Action.REMOVE: "remove", Action.RENAME: "rename something to"}.get(
            answer.access.action, "write to"
        )
        allow = answer.change.toml if answer.change is not None else ""
        danger = f"; {answer.change.danger}" if answer.change is not None and answer.change.danger else ""
        question = LearnQuestion(f"{verb} {path}", f"{answer.reason}{danger}", allow)
        self._ask_in_words(f"write {path}", question)

    def _cache(self, real: str) -> str:
        home = self._places.home
        for name in CACHES:
            tree = f"{home}/{name}"
            if covers(tree, real):
                inner = real[len(tree) + 1 :].partition("/")[0] if name == ".cache" else ""
                return self._text(f"{tree}/{inner}".rstrip("/"))
        return ""

    def _ask(self, path: str, wanted: str, why: str, clause: str = "") -> None:
        writable = clause and _can_be_written(path)
        allow = f"{clause} = [{quote(self._text(path))}]" if writable else ""
        option = f"--{clause} {shlex.quote(literal(path))}" if writable else ""
        self._ask_in_words(path, LearnQuestion(wanted, why, allow, option))

    def _ask_in_words(self, key: str, question: LearnQuestion) -> None:
        if len(self._questions) < MOST_QUESTIONS:
            self._questions.setdefault(key, question)
        elif key not in self._questions:
            more = LearnQuestion("use more than is listed here", "the program tried too many")
            self._questions.setdefault("more", more)

    def _collapsed(self) -> list[MissingPath]:
        granted: dict[str, MissingPath] = {}
        for need in self._needs.values():
            tree = self._known_tree(need.path)
            if tree:
                _join(granted, MissingPath(tree, True, need.programs, need.files))
            elif not need.is_dir:
                granted.setdefault(need.path, need)
            elif why := self._unfit(need.path):
                self._ask(need.path, f"list {need.path}", why, "read")
            else:
                granted.setdefault(need.path, need)
        self._collapse_directories(granted)
        return [
            one
            for one in granted.values()
            if not any(covers(above, one.path) for above in _above(one.path) if above in granted)
        ]

    def _collapse_directories(self, granted: dict[str, MissingPath]) -> None:
        """Replace `FEW` paths of one directory by the directory, from the deepest up."""
        for depth in range(max((path.count("/") for path in granted), default=0), 2, -1):
            inner: dict[str, list[MissingPath]] = {}
            for path, need in granted.items():
                if path.count("/") == depth:
                    inner.setdefault(os.path.dirname(path), []).append(need)
            for directory, needs in inner.items():
                if len(needs) < FEW or directory in granted:
                    continue
                if not self._unfit(directory):
                    for need in needs:
                        del granted[need.path]
                    programs = set().union(*(need.programs for need in needs))
                    files = sum(need.files for need in needs)
                    granted[directory] = MissingPath(directory, True, programs, files)

    def _unfit(self, tree: str) -> str:
        """Say why a directory is not granted as a whole; each is looked through once, and not too many."""
        if tree not in self._judged:
            many = len(self._judged) >= MOST_TREES
            self._judged[tree] = "the program tried too many directories" if many else self._judge(tree)
        return self._judged[tree]

    def _judge(self, tree: str) -> str:
        if not _can_be_written(tree):
            return "a policy cannot write such a name"
        places = self._places
        return (
            places.in_the_way(tree) or places.secret(tree) or places.in_tree(tree) or self._ungrantable(tree)
        )

    def _known_tree(self, path: str) -> str:
        """Return the tree of the profile `dev` that a path is in, as far as it may be granted."""
        home = self._places.home
        for known in profile("dev").read:
            tree = known.removesuffix("?").replace("~", home, 1)
            if tree != "/opt" and covers(tree, path) and not self._places.in_the_way(tree):
                return tree
        return ""

    def _text(self, path: str) -> str:
        home = self._places.home
        if self._places.tilde and covers(home, path) and path != home:
            return f"~{literal(path[len(home) :])}"
        return literal(path)


def _join(granted: dict[str, MissingPath], need: MissingPath) -> None:
    known = granted.setdefault(need.path, MissingPath(need.path, True, set(), 0))
    known.programs |= need.programs
    known.files += need.files


def _note(notes: dict[str, None], path: str) -> None:
    if len(notes) < MOST_QUESTIONS:
        notes[path] = None


def _above(path: str) -> Iterable[str]:
    while (path := os.path.dirname(path)) not in ("/", ""):
        yield path


def _can_be_written(path: str) -> bool:
    """Whether a policy can name the path: as Unicode, and without a ? at its end, which has a meaning."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return not path.endswith("?") and "\0" not in path


def _reason(need: MissingPath) -> str:
    what = f"{need.files} paths" if need.files > 1 else "listed" if need.is_dir else ""
    return "; ".join(filter(None, (what, by_programs(need.programs))))
