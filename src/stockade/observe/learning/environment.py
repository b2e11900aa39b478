"""Which of the user's environment variables the programs of a run read, by their names.

A program reads a variable in its own memory, where nobody sees it. So names come from a table: what programs
of a kind obey, if the run executed such a program and the user has set the variable. A name or a value that
looks like a secret is a question, and the variable is passed if the user agrees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from stockade.observe.learning.lesson import Consent, LearnedEntry, LearnQuestion, refuse
from stockade.observe.learning.secret_content import secret_in_variable
from stockade.policy.values import quote

#: By the beginning of a program's name: the variables that it obeys, `*` at the end of one for any ending.
READS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("git",), ("GIT_AUTHOR_*", "GIT_COMMITTER_*", "GIT_DEFAULT_HASH", "GIT_TERMINAL_PROMPT")),
    (("pip",), ("PIP_*",)),
    (("python", "pypy", "pytest"), ("PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTEST_*", "PIP_*")),
    (("uv",), ("UV_*",)),
    (("node", "npm", "npx", "yarn", "pnpm"), ("NODE_ENV", "NPM_CONFIG_*", "npm_config_*", "COREPACK_*")),
    (("make", "gmake"), ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CC", "CXX", "CPP", "LD", "AR")),
    (
        ("make", "gcc", "g++", "cc", "c++", "clang", "cmake", "ninja", "meson", "ld"),
        ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "SOURCE_DATE_EPOCH"),
    ),
    (("cargo", "rustc"), ("CARGO_BUILD_*", "CARGO_PROFILE_*", "RUSTFLAGS", "RUST_BACKTRACE")),
    (("go",), ("GOFLAGS", "GOPROXY", "GOOS", "GOARCH", "CGO_ENABLED")),
    (("java", "mvn", "gradle"), ("JAVA_OPTS", "JAVA_TOOL_OPTIONS", "MAVEN_OPTS", "GRADLE_OPTS")),
)  # fmt: skip
#: How many names a learned policy passes on.
MOST_NAMES = 32
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH(?!OR)|API_?KEY|ACCESS_?KEY|PRIVATE|SIGNING", re.IGNORECASE
)


def learn_environment(
    executed: Iterable[str],
    environ: Mapping[str, str],
    known: Iterable[str] = (),
    consent: Consent = refuse,
) -> tuple[tuple[LearnedEntry, ...], tuple[LearnQuestion, ...]]:
    """Return the variables to pass on, and those to ask about.

    `executed` are the paths of programs, `known` the names that the policy sets or passes already.
    """
    names = {path.rpartition("/")[2] for path in executed}
    skipped = frozenset(known)
    entries: dict[str, LearnedEntry] = {}
    questions: dict[str, LearnQuestion] = {}
    for beginnings, patterns in READS:
        programs = sorted(name for name in names if name.startswith(beginnings))
        if not programs:
            continue
        for name in sorted(environ):
            if name in skipped or not any(_fits(name, pattern) for pattern in patterns):
                continue
            if (why := _secret(name, environ[name])) and not consent(f"read the variable {name}", why):
                allow, option = f"pass_env = [{quote(name)}]", f"--pass-env {name}"
                questions[name] = LearnQuestion(f"read the variable {name}", why, allow, option)
            elif len(entries) < MOST_NAMES:
                entries.setdefault(name, LearnedEntry(name, programs[0]))
    return tuple(entries.values()), tuple(questions.values())


def _secret(name: str, value: str) -> str:
    """Say why a variable may hold a secret, without its value; empty if nothing suggests it."""
    if _SECRET_NAME.search(name):
        return "a variable of this name often holds a secret"
    what = secret_in_variable(value)
    return f"its value looks as if it has {what} in it" if what else ""


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
