"""Attacks on the observer: it is in the way of nothing, and gives nobody more than the walls do.

The program of most tests, observed.c, runs with and without an observer: whatever it tries must end alike.
"""

from __future__ import annotations

from functools import cache

import pytest

import stockade
from attacks.arena import compiled
from stockade import Policy, Result

PLAIN = ("files", "processes", "devices")


@cache
def program(directory: str) -> str:
    return str(compiled("observed.c"))


def play(game: str = "", *, explain: bool, **policy: object) -> Result:
    words = [program(""), *([game] if game else [])]
    return stockade.run(
        words,
        Policy(read=[words[0]], **policy),
        explain=explain,
        timeout=90,  # type: ignore[arg-type]
    ).check()


@pytest.fixture(scope="module", autouse=True)
def built(attack_builds: object) -> None:
    program.cache_clear()


def test_every_call_ends_as_it_does_without_an_observer() -> None:
    ordinary, observed = play(explain=False), play(explain=True)
    assert observed.text.splitlines() == ordinary.text.splitlines()
    assert len(ordinary.text.splitlines()) > 120
    assert observed.observed and not ordinary.observed
    calls = {one.target for one in observed.denials if one.what in ("call", "mount")}
    assert calls == {"mount", "unshare", "ptrace", "keyctl", "bpf"}, "and not clone3"


@pytest.mark.parametrize("game", ["block", "confine", "attack", "proc"])
def test_whatever_it_tries_it_gets_what_it_would_get_without_an_observer(game: str) -> None:
    ordinary, observed = play(game, explain=False), play(game, explain=True)
    assert observed.text == ordinary.text
    if game == "confine":
        assert "read: EACCES" in observed.text


def test_a_thread_that_rewrites_a_path_gets_one_file_or_the_other_and_never_what_is_refused() -> None:
    result = play("rewrite", explain=True)
    assert result.text == "wrong: 0\n"
    assert [one.target for one in result.denials] == ["mount"]
    assert result.denials[0].count == 3000


def test_calls_are_neither_lost_nor_made_twice_in_a_storm_of_signals() -> None:
    lines = play("storm", explain=True).text.splitlines()
    assert lines == ["failed: 0, signals: many, interrupted: 0", "failed: 0, signals: many"]


def test_ten_thousand_processes_are_all_answered() -> None:
    result = play("crowd", explain=True)
    assert result.text == "failed: 0\n"
    assert [(one.target, one.count) for one in result.denials] == [("mount", 10_000)]


def test_what_does_not_fit_is_counted_and_nothing_waits() -> None:
    result = play("flood", explain=True)
    assert result.text == "flooded\n"
    assert "did not fit in the memory of the observer" in result.denials_cut
    assert [one.target for one in result.denials] == ["mount"]


def test_a_program_that_hides_its_memory_is_said_to_have_been_unobserved() -> None:
    result = play("hide", explain=True)
    assert "hidden mount: EPERM" in result.text
    assert result.denials_cut.endswith("calls came from programs whose memory the observer cannot read")
    assert [one.target for one in result.denials] == ["mount"]


@pytest.mark.parametrize("backend", ["native", "landlock"])
def test_the_observer_itself_opens_files_and_without_room_the_call_fails(backend: str) -> None:
    script = """
import errno, os, resource, tempfile
path = os.path.join(tempfile.gettempdir(), "made")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
except OSError as error:
    print(errno.errorcode[error.errno], os.path.lexists(path))
"""
    accept = [*PLAIN, "protect"] if backend == "landlock" else []
    policy = Policy(backend=backend, accept=accept)
    found = [
        stockade.run(["/usr/bin/python3", "-I", "-S", "-c", script], policy, explain=explain).check().text
        for explain in (False, True)
    ]
    # The one trace of the observer: it made the file before there was no room for the descriptor.
    assert found == ["EMFILE False\n", "EMFILE True\n"]


def test_without_namespaces_the_observer_is_no_way_around_landlock() -> None:
    script = (
        "cat /proc/self/status; cat /proc/1/status; ls /proc/self/fd; cat /etc/shadow; echo > /dev/ptmx;"
        "unshare -U true; echo a > $TMPDIR/a && cat $TMPDIR/a; mkdir -m 700 $TMPDIR/d; ls /proc; true"
    )
    policy = Policy(backend="landlock", accept=[*PLAIN, "protect"])
    ordinary, observed = (
        stockade.run(["sh", "-c", script], policy, explain=explain).check() for explain in (False, True)
    )
    assert (observed.text, observed.stderr_text) == (ordinary.text, ordinary.stderr_text)
    assert {"/etc/shadow", "unshare"} <= {one.target for one in observed.denials}
