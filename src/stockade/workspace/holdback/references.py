"""Files of the workspace that tools obey because a file of the host's, which tools obey, names them.

CLAUDE.md imports `@docs/rules.md`, .envrc sources env.d/x, a hook of .claude/settings.json runs
tools/start.sh: a program that writes those files controls the agent or the shell as much as one that writes
the first. So we read the files in `reference_sources`, as the host has them and never as the program left
them: in directories of the workspace, in those above it, and in the user's home. We follow imports of
instructions, sourced files and what managers of environments evaluate (`use flake`, `devbox shellenv`) in
turn, but not scripts, and of the tools that a command finds by name only those in `EVALUATED`. We execute
nothing. A repository may be hostile before any program ran in it, so there are limits for each
file and for all of them together.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from stockade.policy import holdback_lookup
from stockade.workspace.holdback.aliases import SKIPPED
from stockade.workspace.holdback.reference_sources import SOURCES
from stockade.workspace.version_control.hook_paths import HookPaths, Lead, index_leads
from stockade.workspace.version_control.repositories import small

#: Limits: bytes of one file and of all, number of files, depth of imports, number of names.
LARGEST, MOST_BYTES, MOST_FILES, DEEPEST, MOST_NAMES = 1 << 20, 8 << 20, 1_000, 5, 10_000
#: How many directories to search, those nearest to the top first: some 20 µs for each.
MOST_PLACES = 5_000

#: Keys of JSON and TOML whose strings are commands, arguments or files.
KEYS = frozenset({
    "hooks", "command", "args", "statusLine", "apiKeyHelper", "awsAuthRefresh", "awsCredentialExport",
    "otelHeadersHelper", "instructions", "contextFileName", "fileName", "notify", "model_instructions_file",
    "experimental_instructions_file", "initializeCommand", "onCreateCommand", "updateContentCommand",
    "postCreateCommand", "postStartCommand", "postAttachCommand", "dockerFile", "dockerfile",
    "dockerComposeFile", "_", "init_hook", "include", "env_file",
})  # fmt: skip
#: What ends the keys of editors' settings whose strings are programs.
PROGRAM_KEYS = ("path", "command", "interpreter", "executable", "tsdk", "binary")
#: Keys of YAML whose values are names, patterns and versions.
NO_COMMANDS = frozenset({
    "repo", "rev", "id", "name", "alias", "description", "files", "exclude", "types", "types_or",
    "exclude_types", "stages", "language", "language_version", "glob", "tags", "skip", "only",
    "default_stages", "default_language_version", "minimum_pre_commit_version", "min_version",
    "exclude_tags", "file_types", "env", "ci",
})  # fmt: skip
#: Shell commands that read their arguments, that add them to PATH, and words that a command follows.
SOURCING = frozenset(("source", ".", "source_env", "source_env_if_exists", "dotenv", "dotenv_if_exists"))
SOURCING_ABOVE = frozenset(("source_up", "source_up_if_exists"))
PATHS = frozenset(("PATH_add", "path_add", "load_prefix"))
BEFORE_COMMANDS = frozenset({
    "export", "eval", "exec", "if", "then", "else", "elif", "!", "time", "env", "command", "sudo", "do",
    "while", "until", "builtin", "direnv_load", "nice", "nohup", "timeout", "{",
})  # fmt: skip
#: What stands between such a word and the command: an option, or a number of it.
_OPTION = re.compile(r"-.*|\d[\d.]*[smhd]?")
#: Commands that print files, and words of a line that evaluates what they print.
PRINTING = frozenset(("cat", "envsubst", "grep", "head", "sed", "tail"))
EVALUATING = re.compile(r"\b(?:eval|export|source)\b")
INTERPRETERS = re.compile(r"(ba|da|z|k)?sh|python[\d.]*|node|ruby|perl|deno|bun|php|lua|fish")
#: By the word after direnv's `use` and `layout`, and by the program: the files of the project that it
#: evaluates, or whose commands it runs, before the shell goes on.
_NIX, _FLAKE = ("shell.nix", "default.nix"), ("flake.nix", "flake.lock")
_CONDA, _MAKE = ("environment.yml", "environment.yaml"), ("Makefile", "makefile", "GNUmakefile")
_PACKAGE = ("package.json",)
_COMPOSE = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")
EVALUATED: dict[str, tuple[str, ...]] = {
    "flake": _FLAKE, "nix": (*_NIX, *_FLAKE), "nix-shell": _NIX, "nix-build": _NIX, "lorri": _NIX,
    "devenv": ("devenv.nix", "devenv.yaml", "devenv.lock", "devenv.local.nix"),
    "devbox": ("devbox.json", "devbox.lock"),
    "guix": ("guix.scm", "manifest.scm", "channels.scm"),
    "pixi": ("pixi.toml", "pixi.lock", "pyproject.toml"),
    "conda": _CONDA, "mamba": _CONDA, "micromamba": _CONDA, "anaconda": _CONDA,
    "poetry": ("pyproject.toml", "poetry.lock"), "pdm": ("pyproject.toml", "pdm.lock"),
    "pipenv": ("Pipfile", "Pipfile.lock"), "uv": ("pyproject.toml", "uv.lock"),
    "hatch": ("pyproject.toml", "hatch.toml"), "asdf": (".tool-versions",), "aqua": ("aqua.yaml",),
    "bundle": ("Gemfile", "Gemfile.lock"), "cargo": ("Cargo.toml", "build.rs"),
    "make": _MAKE, "gmake": _MAKE, "just": ("justfile", ".justfile"),
    "task": ("Taskfile.yml", "Taskfile.yaml"),
    "npm": _PACKAGE, "npx": _PACKAGE, "pnpm": _PACKAGE, "yarn": _PACKAGE, "bun": _PACKAGE,
    "docker": _COMPOSE, "docker-compose": _COMPOSE, "podman-compose": _COMPOSE,
    "nox": ("noxfile.py",), "tox": ("tox.ini",), "invoke": ("tasks.py",), "inv": ("tasks.py",),
}  # fmt: skip
#: How such a file is read for the names of others, by its name or its ending.
EVALUATED_KINDS = {
    "devbox.json": "json", "devenv.yaml": "yaml", "pixi.toml": "activation", "pyproject.toml": "activation",
    ".nix": "nix", ".scm": "nix",
}  # fmt: skip
#: The kinds of files of the user's own in which a relative name counts from the project.
OF_PROJECTS = ("imports", "json", "toml", "yaml")

_IMPORT = re.compile(r"""(?:^|(?<=[\s(\[{*_"'`>:,;-]))@([^\s"'`<>()\[\]{},;]+)""", re.MULTILINE)
_HOME = re.compile(r"\$(?:HOME|\{HOME\})/")
#: An expression for a directory at the beginning of a path.
_VARIABLE = re.compile(r"\$\([^()]{0,200}\)/|\$?\{{1,2}[^{}]{0,100}\}{1,2}/|\$\w{1,100}\$?/|%\w{1,100}%/")
_WORDS = re.compile(r"""[^\s'"`;|&()<>=${}\[\],]+""")
_COMMANDS = re.compile(r"[;&|()`\n]+")
_INPUT = re.compile(r"(?<!<)<\s*([^\s<>()&;|]+)")
_ASSIGNED = re.compile(r"\w+\+?=")
_MODULE = re.compile(r"(?:^|\s)-m\s+([\w.]{1,200})")
#: A string, which stays, or a comment, or a trailing comma.
_JSONC = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\\?\Z))|//[^\n]*|/\*.*?(?:\*/|\Z)|,(?=\s*[}\]])', re.DOTALL)
_KEY = re.compile(r"[\w-]+")
#: In the definition of a pipeline: what it includes by a key, as an item of a list, or by a call.
_INCLUDED = re.compile(
    r"""(?m)^[ \t]*(?:-[ \t]+)?(?:uses|local|template|include|import)[ \t]*:[ \t]*"""
    r"""["']?([./\w-]+)["']?[ \t]*$"""
    r"""|^[ \t]*(?:-|(?:-[ \t]+)?run:)[ \t]+["']?(/?[\w./-]+\.ya?ml)["']?[ \t]*$"""
    r"""|\b(?:load|readTrusted)[ \t(]+["']([^"'\n]+)["']"""
)
_YAML = re.compile(r"""(\s*(?:-\s+)?)(?:["']?([\w.-]+)["']?\s*:(?:\s|$))?(.*)""")


class _Source(NamedTuple):
    """A file to read."""

    path: str
    kind: str
    bases: tuple[str, ...]
    #: What the tool does with the file and with those that it names.
    why: str
    depth: int = 0


class _Name(NamedTuple):
    """A name that a file mentions."""

    name: str
    #: Whether everything below it counts.
    tree: bool = False
    #: Whether to read it like the file that names it, or by which parser.
    read: bool = False
    kind: str = ""


def references(tree: str, directories: Iterable[str], home: str) -> HookPaths:
    """Return the paths of a workspace that the host's files in these directories lead to.

    Directories of packages and repositories are skipped.
    """
    reader = _ReferenceReader(tree, home)
    leads = sorted(set(reader.leads(directories)), reverse=True)
    return index_leads(leads, reader.unread)


class _ReferenceReader:
    """Reads the host's files, each once."""

    def __init__(self, tree: str, home: str) -> None:
        self._tree, self._home = tree, home
        self._bytes, self._files, self._names = MOST_BYTES, MOST_FILES, MOST_NAMES
        self.unread: dict[str, str] = {}

    def leads(self, directories: Iterable[str]) -> Iterator[Lead]:
        pending = deque(self._sources(directories))
        seen, looked_up = set[str](), set[tuple[_Name, tuple[str, ...]]]()
        while pending:
            source = pending.popleft()
            if source.path in seen or (text := self._content(source.path)) is None:
                continue
            seen.add(source.path)
            why = f"{self._shown(source.path)} names it: {source.why}"
            for name in KINDS[source.kind](text):
                if (name, source.bases) in looked_up:
                    continue
                looked_up.add((name, source.bases))
                self._names -= 1
                if self._names < 0:
                    self.unread[source.path] = "it names too many files; the rest were not checked"
                    return
                for place in self._places(name, source.bases):
                    yield Lead(place, why, name.tree)
                    if name.read and source.depth < DEEPEST:
                        # Relative names count from the real file, not from a link to it.
                        bases = (os.path.dirname(place),)
                        kind = name.kind or source.kind
                        pending.append(_Source(place, kind, bases, source.why, source.depth + 1))

    def _sources(self, directories: Iterable[str]) -> Iterator[_Source]:
        above, place = list[str](), self._tree
        while place != os.path.dirname(place):
            place = os.path.dirname(place)
            above.append(place)
        wanted = {self._tree, *filter(self._is_own, directories)}
        inside = sorted(wanted, key=lambda path: (path.count("/"), path))
        if len(inside) > MOST_PLACES:
            self.unread[self._tree] = "too many directories; not all were searched for files that name others"
        for place in dict.fromkeys((*inside[:MOST_PLACES], *above, self._home)):
            for name, kind in _named_sources(place):
                # The user's own settings apply in the project that the tool starts in.
                own = (self._tree,) if place == self._home and kind in OF_PROJECTS else ()
                path = f"{place}/{name}"
                if why := _why(name):
                    yield _Source(path, kind, (place, os.path.dirname(path), *own), why)

    def _is_own(self, directory: str) -> bool:
        return SKIPPED.isdisjoint(directory[len(self._tree) :].split("/"))

    def _shown(self, path: str) -> str:
        return path.removeprefix(f"{self._tree}/")

    def _content(self, path: str) -> str | None:
        data = small(path, min(LARGEST, self._bytes)) if self._files else None
        if data is None:
            if os.path.isfile(path):
                self.unread[path] = "not checked for the files that it names: unreadable or too large"
            return None
        self._files -= 1
        self._bytes -= len(data)
        return os.fsdecode(data).removeprefix("\ufeff")

    def _places(self, name: _Name, bases: Iterable[str]) -> Iterator[str]:
        """Yield the places in the workspace that a name leads to: as written, and with links resolved."""
        words = f"{self._home}{name.name[1:]}" if name.name.startswith("~/") else name.name
        if not words or "\0" in words or len(words) > os.pathconf("/", "PC_PATH_MAX"):
            return
        likely = name.tree or name.read or "/" in words or "." in words[1:]
        found = set[str]()
        for base in bases:
            place = os.path.normpath(os.path.join(base, words))
            if (likely or os.path.lexists(place)) and (name.tree or not os.path.isdir(place)):
                found |= {place, os.path.realpath(place)}
        yield from sorted(place for place in found if place.startswith(f"{self._tree}/"))


@functools.cache
def _source_patterns() -> tuple[dict[str, list[tuple[str, str]]], list[tuple[re.Pattern[str], str, str]]]:
    """Return what follows the first name of each pattern, and its kind: by that name, or its expression."""
    exact: dict[str, list[tuple[str, str]]] = {}
    globs = []
    for kind, patterns in SOURCES.items():
        for pattern in holdback_lookup.expanded(patterns.split()):
            first, _, rest = pattern.partition("/")
            if "*" in first:
                globs.append((re.compile(fnmatch.translate(first)), rest, kind))
            else:
                exact.setdefault(first, []).append((rest, kind))
    return exact, globs


def _named_sources(place: str) -> Iterator[tuple[str, str]]:
    """Yield the regular files of `SOURCES` in a directory, relative to it, with their kinds."""
    exact, globs = _source_patterns()
    try:
        entries = os.listdir(place)
    except OSError:
        entries = [*exact]  # a directory that may be entered, but not listed
    for entry in sorted(entries):
        wanted = exact.get(entry, [])
        wanted = wanted + [(rest, kind) for form, rest, kind in globs if form.match(entry)]
        for rest, kind in wanted:
            for name in _matches(place, entry, rest):
                yield name, kind


def _matches(place: str, name: str, rest: str) -> Iterator[str]:
    """Yield the files below a directory that match the rest of a pattern."""
    if not rest:
        if os.path.isfile(f"{place}/{name}"):
            yield name
        return
    wanted, _, further = rest.partition("/")
    inner = [wanted]
    if "*" in wanted:
        try:
            inner = sorted(fnmatch.filter(os.listdir(f"{place}/{name}"), wanted))
        except OSError:
            return
    for one in inner:
        yield from _matches(place, f"{name}/{one}", further)


def _why(name: str) -> str:
    """Return what the tool does with a file; empty for one that it leaves alone, such as a hook's sample."""
    entry = holdback_lookup.obeyed(name, stat.S_IFREG)
    return entry.why if entry is not None else ""


def _imports(text: str) -> Iterator[_Name]:
    for name in _IMPORT.findall(text):
        # Trailing punctuation may or may not be part of the name.
        yield from (_Name(one, read=True) for one in {name, name.rstrip(".:!?*_")})


def _shell(text: str, *, evaluates: bool = True) -> Iterator[_Name]:
    """Yield what a script names; `evaluates` says whether what its programs evaluate counts too."""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        plain = _VARIABLE.sub("", _HOME.sub("~/", line)).replace('"', "").replace("'", "")
        prints = evaluates and EVALUATING.search(line)
        if evaluates:
            yield from map(_Name, _INPUT.findall(plain))
        for command in _COMMANDS.split(plain):
            words = command.partition(" #")[0].split()
            if prints and words and words[0] in PRINTING:
                yield from (_Name(word) for word in words[1:] if not word.startswith("-"))
            yield from _command(words, evaluates)


def _hook(text: str) -> Iterator[_Name]:
    """Yield what a hook names. What `make` or `npm` run for it is code of the project, as in a build."""
    return _shell(text, evaluates=False)


def _command(words: list[str], evaluates: bool) -> Iterator[_Name]:
    """Yield the files that one shell command reads, runs or adds to PATH."""
    words = words[words.index("{") + 1 :] if "{" in words else words  # the body of a function
    at = 0
    while at < len(words) and _precedes(words[at], first=at == 0):
        name, _, value = words[at].partition("=")
        at += 1
        if name.rstrip("+") == "PATH":
            yield from (_Name(part, tree=True) for part in value.split(":"))
    words = words[at:]
    if not words:
        return
    first, *rest = words
    first = first.removeprefix("\\")  # past an alias
    if first.startswith(("use_", "layout_")):  # the function behind `use NAME`
        first, _, name = first.partition("_")
        rest = [name, *rest]
    files = [word for word in rest if not word.startswith("-")]
    if first in SOURCING:
        yield from (_Name(word, read=True) for word in files)
    elif first in SOURCING_ABOVE:
        above = ("../" * levels for levels in range(1, DEEPEST + 1))
        yield from (_Name(f"{way}{word}", read=True) for way in above for word in files)
    elif first in PATHS:
        yield from (_Name(word, tree=True) for word in files)
    elif first in ("use", "layout"):
        yield from (name for word in files[:1] for name in _evaluated(word, rest[1:]))
    elif first in EVALUATED and evaluates:
        yield from _evaluated(first, rest)
    elif first == "for" and evaluates:
        patterns = (word.partition("*")[0] for word in files if "*" in word)
        yield from (_Name(os.path.dirname(pattern), tree=True) for pattern in patterns)
    elif "/" in first:
        yield _Name(first)
    elif INTERPRETERS.fullmatch(first):
        yield from _words(" ".join(rest))


def _precedes(word: str, *, first: bool) -> bool:
    """Whether the command follows after this word."""
    return (
        word in BEFORE_COMMANDS
        or bool(_ASSIGNED.match(word))
        or (not first and bool(_OPTION.fullmatch(word)))
    )


def _evaluated(program: str, arguments: list[str]) -> Iterator[_Name]:
    """Yield the files that a program evaluates: those it looks for here or where an argument says."""
    files = EVALUATED.get(program, ())
    # Such as `--file=x`, and `path:./x?dir=y#shell` of a flake.
    values = [part for word in arguments for part in re.split(r"[=:?]", word.partition("#")[0])]
    values = [value for value in values if files and not value.startswith("-")]
    places = [value for value in values if "/" in value or "." in value]
    for name in (*places, *(f"{place}/{name}" for place in (".", *values) for name in files)):
        base = os.path.basename(name)
        kind = EVALUATED_KINDS.get(base) or EVALUATED_KINDS.get(os.path.splitext(base)[1], "")
        yield _Name(name, read=bool(kind), kind=kind)


def _words(command: str) -> Iterator[_Name]:
    """Yield the words of a command that may be files, with the modules that its interpreter loads."""
    command = _VARIABLE.sub("", command)
    for module in _MODULE.findall(command):
        place = module.replace(".", "/")
        yield from (_Name(f"{place}{ending}") for ending in (".py", "/__init__.py", "/__main__.py"))
    yield from (_Name(word.lstrip("!@")) for word in _WORDS.findall(command) if not word.startswith("-"))


def _json(text: str) -> Iterator[_Name]:
    import json

    try:
        value = json.loads(_JSONC.sub(lambda found: found[1] or "", text))
    except (ValueError, RecursionError):  # the tool may read it nevertheless
        yield from _file_words(text)
    else:
        yield from _values(value)


def _toml(text: str) -> Iterator[_Name]:
    """Read TOML line by line: a parser takes time that grows with the square of a key's length."""
    section = keys = frozenset[str]()
    for line in text.splitlines():
        if line.startswith("["):
            section = frozenset(_KEY.findall(line))
            continue
        key, equals, value = line.partition("=")
        if equals and "[" not in key:  # else a list continues
            keys = section.union(_KEY.findall(key))
        if any(map(_is_named, keys)):
            tree = "path" in keys or "path" in _KEY.findall(value)
            yield from (one._replace(tree=tree) for one in _words(value if equals else line))


def _activation(text: str) -> Iterator[_Name]:
    """Yield the scripts that pixi runs when it enters an environment."""
    within = False
    for line in text.splitlines():
        within = "activation" in line if line.startswith("[") else within
        if within or "activation" in line:
            yield from _words(line)


def _values(top: Any) -> Iterator[_Name]:
    """Yield the names in all strings below one of `KEYS`."""
    pending: list[tuple[Any, bool, bool]] = [(top, False, False)]
    while pending:
        value, counts, path = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                within = counts or _is_named(key)
                pending.append((inner, within, path or (within and key == "path")))
        elif isinstance(value, list):
            pending += ((inner, counts, path) for inner in value if not isinstance(inner, str))
            # Arguments belong together: `-m` and its module.
            pending.append((" ".join(inner for inner in value if isinstance(inner, str)), counts, path))
        elif isinstance(value, str) and counts:
            yield from (one._replace(tree=path) for one in _words(value))


def _is_named(key: str) -> bool:
    """Whether the strings below a key of JSON or TOML are commands or files."""
    return key in KEYS or key.lower().endswith(PROGRAM_KEYS)


def _yaml(text: str) -> Iterator[_Name]:
    """Read YAML line by line: the values of keys that may hold commands, with everything indented below."""
    skipped = -1
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _YAML.match(line)
        assert found is not None
        indent = len(found[1])
        if 0 <= skipped < indent:
            continue
        skipped = indent if found[2] in NO_COMMANDS else -1
        if skipped < 0:
            # Files such as a hook's `--config pyproject.toml` are only listed as running at the next command.
            for name in _words(found[3].partition(" #")[0]):
                if holdback_lookup.runs(os.path.normpath(name.name), stat.S_IFREG) is None:
                    yield name


def _pipeline(text: str) -> Iterator[_Name]:
    """Yield the definitions that a pipeline includes: actions, templates, further files of it."""
    for found in _INCLUDED.finditer(text):
        name = (found[1] or found[2] or found[3]).lstrip("/")
        yield _Name(name, tree=name.startswith("./"), read=name.endswith((".yml", ".yaml")))


def _file_words(text: str) -> Iterator[_Name]:
    """Yield what looks like a path in a file of no known format, except for comments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("#", ";", "//")))
    plain = _VARIABLE.sub("", _HOME.sub("~/", "\n".join(lines))).replace(":", " ")
    words = dict.fromkeys(_WORDS.findall(plain))
    likely = [word for word in words if "/" in word.strip("/") or "." in word.strip(".")]
    yield from map(_Name, likely)


def _expressions(text: str) -> Iterator[_Name]:
    """Yield the files that an expression of Nix or Guix imports; a directory stands for its default.nix."""
    for name in _file_words(text):
        read = name.name.endswith((".nix", ".scm"))
        yield name._replace(read=read)
        if name.name.startswith(("./", "../")) and not read:
            yield _Name(f"{name.name}/default.nix", read=True)


KINDS: dict[str, Callable[[str], Iterator[_Name]]] = {
    "imports": _imports,
    "shell": _shell,
    "hook": _hook,
    "json": _json,
    "toml": _toml,
    "yaml": _yaml,
    "pipeline": _pipeline,
    "words": _file_words,
    "nix": _expressions,
    "activation": _activation,
}
