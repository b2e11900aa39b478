"""What may be asked for, and how what may not is refused: before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.gate import wire


def test_a_command_is_a_list_not_a_string() -> None:
    with pytest.raises(PolicyError, match="one string") as caught:
        stockade.run("echo hello")  # type: ignore[arg-type]
    assert "write ['echo', 'hello']" in caught.value.hint


def test_there_must_be_a_command() -> None:
    with pytest.raises(PolicyError, match="no command"):
        stockade.run([])


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_timeout_that_is_none_is_refused_by_its_own_name(timeout: float) -> None:
    with pytest.raises(PolicyError, match=r"^timeout = ") as caught:
        stockade.run(["true"], timeout=timeout)
    assert "limits.wall" not in str(caught.value) and "seconds" in caught.value.hint


def test_an_empty_word_is_no_command() -> None:
    result = stockade.run([""])
    assert (result.outcome, result.exit_code) == ("setup-failed", 127)


def test_a_word_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(PolicyError, match="NUL"):
        stockade.run(["echo", "a\0b"])


def test_a_path_object_is_a_word() -> None:
    assert stockade.run([Path("/bin/echo"), "x"]).text == "x\n"  # type: ignore[list-item]


def test_words_arrive_as_they_are() -> None:
    words = ["", " ", "a b", "*", "$HOME", "-n", "\n", "ä€", "\udcff", "'\""]
    script = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    result = stockade.run(["/usr/bin/python3", "-c", script, *words])
    assert result.stdout.decode("utf-8", "surrogateescape").split("\0") == words


def test_a_command_just_as_long_as_a_request_takes_arrives_and_so_do_longer_ones() -> None:
    with Sandbox() as box:
        seen = []
        for size in (*range(wire.EXEC_SHORT - 600, wire.EXEC_SHORT + 8, 19), 100_000):
            word = "x" * size
            seen.append(box.run(["printf", "%s", word]).text == word)
        assert all(seen)


def test_a_megabyte_of_arguments_arrives() -> None:
    words = ["y" * 1000] * 1000
    assert stockade.run(["echo", *words]).stdout == (" ".join(words) + "\n").encode()


def test_more_arguments_than_the_gate_takes_are_refused_and_the_reason_says_so() -> None:
    with pytest.raises(PolicyError, match="more than 8388608") as refused:
        stockade.run(["echo", *["y" * 1000] * 9000])
    assert "standard input" in refused.value.hint


def test_a_word_longer_than_the_kernel_takes_says_so() -> None:
    result = stockade.run(["echo", "y" * 200_000])
    assert not result.ok and "Argument list too long" in result.reason


def test_a_closed_sandbox_runs_nothing() -> None:
    box = Sandbox()
    with pytest.raises(SetupError, match="not open"):
        box.run(["true"])
    with box:
        box.run(["true"]).check()
    with pytest.raises(SetupError, match="not open"):
        box.run(["true"])


def test_a_sandbox_is_not_opened_twice() -> None:
    with Sandbox() as box, pytest.raises(SetupError, match="already open"):
        box.open()


def test_a_sandbox_can_be_closed_again_and_opened_anew() -> None:
    box = Sandbox()
    with box:
        box.run(["touch", "/tmp/x"]).check()
        assert box.run(["test", "-e", "/tmp/x"]).ok
    box.close()
    with box:
        assert not box.run(["test", "-e", "/tmp/x"]).ok


def test_on_exit_knows_its_words() -> None:
    with pytest.raises(PolicyError, match="on_exit"):
        Sandbox(on_exit="forget")  # type: ignore[arg-type]


def test_a_policy_that_names_what_is_not_there_is_refused() -> None:
    with pytest.raises(PolicyError, match="/no/such/path"):
        stockade.run(["true"], Policy(read=["/no/such/path"]))


def test_two_hundred_grants_work(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(200)]
    for path in paths:
        path.mkdir()
    result = stockade.run(["ls", str(tmp_path)], Policy(read=[str(path) for path in paths]))
    assert len(result.check().stdout.split()) == 200


def test_more_grants_than_the_gate_takes_are_refused_in_words(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(300)]
    for path in paths:
        path.mkdir()
    with pytest.raises(stockade.StockadeError):
        stockade.run(["true"], Policy(read=[str(path) for path in paths]))
