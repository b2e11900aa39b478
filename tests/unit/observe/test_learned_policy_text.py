"""A learned policy as a file: readable, exact, and safe whatever the program called its files."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import PolicyError
from stockade.observe.learning.learned_policy import LearnedPolicy
from stockade.observe.learning.lesson import LearnedEntry, LearnQuestion
from stockade.observe.learning.policy_text import LONGEST_COMMENT, merged_text, policy_text
from stockade.policy import Policy
from stockade.policy.toml import clauses, parse

START = Policy()


def entries(*texts: str) -> tuple[LearnedEntry, ...]:
    return tuple(LearnedEntry(text, "why") for text in texts)


def test_the_file_has_every_clause_with_its_reason() -> None:
    learned = LearnedPolicy(
        start=START,
        read=(LearnedEntry("/srv/data", "12 paths; python3"),),
        net=entries("api.example.com:443"),
        pass_env=entries("CFLAGS"),
        exec=entries("/usr/bin/make"),
        limits={"wall": LearnedEntry('"1m"', "it took 9.00 s")},
        questions=(LearnQuestion("read /home/ada/.netrc", "may be a secret", 'read = ["~/.netrc"]'),),
        notes=("Empty at first: ~/.npm.",),
        runs=3,
        settled=True,
    )
    assert (
        policy_text(learned, ["make", "test"], workspace=".")
        == """\
# What this command needs, learned by `stockade learn` from 3 runs of it:
#
#     make test
#
# The command chose what is in here: read it before you use it. `stockade policy check` says what
# this file enforces.

# Files and directories that it reads, besides those of the profile.
read = [
    "/srv/data",                      # 12 paths; python3
]

# Hosts that it reaches. It reaches no other.
net = [
    "api.example.com:443",            # why
]

# Variables of your environment that its programs obey.
pass_env = [
    "CFLAGS",                         # why
]

# The only programs that it may execute. Nothing that it writes is executable.
exec = [
    "/usr/bin/make",                  # why
]

# Empty at first: ~/.npm.

# Not granted. Decide for yourself:
# - read /home/ada/.netrc: may be a secret; to allow it: read = ["~/.netrc"]

[workspace]
path = "."

# With room to spare: another machine is slower, another day there is more to do.
[limits]
wall = "1m"                           # it took 9.00 s
"""
    )


def test_what_the_runs_began_with_is_in_the_file_too() -> None:
    start = Policy(
        profile="dev",
        read=["/a"],
        deny=["x"],
        env={"A B": "1"},
        limits={"memory": "1G"},
        syscalls={"deny": ["ptrace"]},
    )
    learned = LearnedPolicy(start=start, read=entries("/b"), limits={"memory": LearnedEntry('"2G"')})
    found = parse(policy_text(learned, ["true"]))
    assert found == Policy(**{**start.table(full=True), "read": ["/a", "/b"]})


def test_a_policy_that_needs_nothing_is_valid() -> None:
    text = policy_text(LearnedPolicy(start=START, settled=True), ["true"])
    assert clauses(text) == {}


def test_a_run_that_failed_or_did_not_settle_is_told() -> None:
    text = policy_text(LearnedPolicy(start=START, exit_code=3, ended="exit code 3"), ["false"])
    assert "It is not complete" in text and "The last run failed: exit code 3." in text


ANY = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=30)
PATHS = ANY.map(lambda text: "/srv/" + text.replace("\0", "").replace("/..", "").replace("..", ".")).filter(
    lambda text: ".." not in text.split("/")
)


@given(paths=st.lists(PATHS, max_size=5), words=st.lists(ANY, max_size=4), notes=st.lists(ANY, max_size=3))
def test_whatever_the_names_are_the_file_means_what_was_learned(
    paths: list[str], words: list[str], notes: list[str]
) -> None:
    learned = LearnedPolicy(
        start=START,
        read=tuple(
            LearnedEntry(path, word) for path, word in zip(paths, [*notes, *words, *paths], strict=False)
        ),
        limits={"wall": LearnedEntry('"1m"', "".join(notes))},
        questions=tuple(LearnQuestion(note, "".join(words), note) for note in notes),
        notes=tuple(notes),
        exit_code=1,
        ended="".join(words),
    )
    text = policy_text(learned, words or ["true"])
    assert parse(text) == Policy(read=list(learned.policy().read), limits={"wall": "1m"})
    for line in text.split("\n"):
        assert line.isprintable(), "nothing that a terminal obeys"
    merged = merged_text("# mine\nread = []\n", learned, "policy.toml")
    assert parse(merged).read == learned.policy().read


@pytest.mark.parametrize(
    "name",
    [
        'x"]\nnet = "open"\n#',
        "x\r\nwrite = ['/']",
        "\x1b]0;owned\x07",
        "a\u202eb",
        "#",
        "'''",
        '"""',
        "\\",
        "[limits]",
    ],
)
def test_a_name_cannot_add_a_clause(name: str) -> None:
    entry = LearnedEntry(f"/srv/{name}", name)
    learned = LearnedPolicy(
        start=START, read=(entry,), questions=(LearnQuestion(name, name, name),), notes=(name,), ended=name
    )
    text = policy_text(learned, [name])
    assert tomllib.loads(text) == {"read": [f"/srv/{name}"]}
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_question_that_is_too_long_does_not_offer_half_a_line() -> None:
    long = 'read = ["/' + "x" * LONGEST_COMMENT + '"]'
    text = policy_text(LearnedPolicy(start=START, questions=(LearnQuestion("a", "b", long),)), ["true"])
    assert "to allow it" not in text


MERGES = {
    "one line": ('read = ["/a"]\n', 'read = ["/a",\n    "/b",                             # why\n]\n'),
    "empty": ("read = []\n", 'read = [\n    "/b",                             # why\n]\n'),
    "several lines": (
        'read = [\n    "/a",  # mine, ] and "\n]  # end\n',
        'read = [\n    "/a",  # mine, ] and "\n    "/b",                             # why\n]  # end\n',
    ),
    "no comma": (
        'read = [\n    "/a"  # mine\n    # more\n]\n',
        'read = [\n    "/a",  # mine\n    # more\n    "/b",                             # why\n]\n',
    ),
    "a bracket in a name": (
        'read = ["/a]", "/c#"]  # x\n',
        'read = ["/a]", "/c#",\n    "/b",                             # why\n]  # x\n',
    ),
    "missing": (
        '# top\ndeny = ["x"]\n\n# about limits\n[limits]\nwall = "1m"\n',
        '# top\ndeny = ["x"]\n\n'
        "# Files and directories that it reads, besides those of the profile.\n"
        'read = [\n    "/b",                             # why\n]\n\n# about limits\n[limits]\nwall = "1m"\n',
    ),
}


@pytest.mark.parametrize("layout", MERGES)
def test_merging_keeps_comments_and_only_adds(layout: str) -> None:
    before, after = MERGES[layout]
    learned = LearnedPolicy(start=parse(before), read=entries("/b"), exec=entries("/usr/bin/x"))
    assert merged_text(before, learned, "p") == after


def test_merging_leaves_limits_and_an_open_network_as_they_are() -> None:
    text = 'net = "open"\n\n[limits]\nwall = "1s"\n'
    learned = LearnedPolicy(
        start=parse(text), net=entries("a.example:443"), limits={"tasks": LearnedEntry("32")}
    )
    assert merged_text(text, learned, "p") == text


@pytest.mark.parametrize(
    "text",
    [
        '"read" = """x"""',
        'toolchain = true\nread = [\n"/a" ]',
        "toolchain = false\n",
    ],
)
def test_a_layout_that_cannot_be_extended_is_refused_and_never_guessed(text: str) -> None:
    learned = LearnedPolicy(start=START, read=entries("/b"), toolchain=entries("node"))
    with pytest.raises(PolicyError):
        merged_text(text, learned, "policy.toml")


def test_questions_of_a_merge_are_added_once() -> None:
    learned = LearnedPolicy(start=START, questions=(LearnQuestion("read x", "secret"),))
    once = merged_text("", learned, "p")
    assert once.count("read x") == 1 and merged_text(once, learned, "p") == once
