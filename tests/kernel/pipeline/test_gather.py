"""Named sources that one consumer reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import stockade
from stockade import Gather, PolicyError, Stage
from stockade.receipt import public_key
from stockade.receipt.verify import verify
from support.paths import ROOT

SECONDS = 20


def say(word: str) -> Stage:
    return Stage({}, ["echo", word])


def sh(script: str) -> Stage:
    return Stage({}, ["sh", "-c", script])


def test_the_last_source_is_stdin_and_the_others_are_descriptors_from_3_on() -> None:
    read = sh("cat <&3; cat <&4; cat; echo $STOCKADE_INPUTS")
    sources = {"data": say("d"), "more": say("m") | Stage({}, ["cat"]), "code": say("c")}
    result = Gather(sources, into=read, name="all").run(timeout=SECONDS)
    assert result.text == "d\nm\nc\ndata:3,more:4,code:0\n"
    places = ["source-data", "source-more-stage-0", "source-more-stage-1", "source-code", "consumer"]
    assert list(result.stages) == places
    for place, stage in result.stages.items():
        assert stage.receipt is not None and verify(stage.receipt, public_key())
        assert stage.receipt.predicate.name == f"all-{place}"
    last = result.receipt
    assert last is not None and last.predicate.pipeline is not None
    assert last.predicate.pipeline.not_digested == {
        "3": "source-data",
        "4": "source-more-stage-1",
        "stdin": "source-code",
    }


def test_one_source_is_enough_and_its_stdin_is_empty_unless_given() -> None:
    assert Gather({"only": sh("cat; echo end")}, into=sh("cat")).run(timeout=SECONDS).text == "end\n"
    given = Stage({}, ["cat"], input="given")
    assert Gather({"only": given}, into=sh("cat")).run(timeout=SECONDS).text == "given"


def test_sources_of_more_than_a_pipe_holds_can_be_read_one_after_the_other() -> None:
    flood = sh("head -c 500000 /dev/zero")
    result = Gather({"a": flood, "b": flood, "c": flood}, into=sh("wc -c; wc -c <&3; wc -c <&4")).run(
        timeout=SECONDS
    )
    assert result.text == "500000\n" * 3


def test_stockade_inputs_reads_by_name_where_stockade_is_importable() -> None:
    script = (
        "import stockade\n"
        "print(sorted(stockade.inputs), len(stockade.inputs), stockade.inputs)\n"
        "for line in stockade.inputs['data']: print(line)\n"
        "print(stockade.inputs['code'].read(1), stockade.inputs['code'].read())\n"
    )
    policy = {"read": [str(ROOT / "src"), sys.prefix], "env": {"PYTHONPATH": str(ROOT / "src")}}
    into = Stage(policy, [sys.executable, "-c", script])
    result = Gather({"data": sh("echo 1; echo 2"), "code": say("xyz")}, into=into).run(timeout=SECONDS)
    assert result.stderr_text == ""
    assert result.text == ("['code', 'data'] 2 <inputs data, code>\nb'1\\n'\nb'2\\n'\nb'x' b'yz\\n'\n")


def consume() -> None:
    import os

    found = dict(pair.rsplit(":", 1) for pair in os.environ["STOCKADE_INPUTS"].split(","))
    for name, number in found.items():
        with open(int(number), closefd=False) as file:
            print(name, number, file.read().strip())


def test_a_function_can_be_the_consumer() -> None:
    result = Gather({"data": say("d"), "code": say("c")}, into=Stage({}, consume)).run(timeout=SECONDS)
    assert result.text == "data 5 d\ncode 0 c\n", result.stderr_text


def test_a_timeout_covers_the_whole() -> None:
    result = Gather({"slow": sh("echo x; sleep 60")}, into=sh("cat")).run(timeout=0.7)
    assert result.outcome is stockade.Outcome.TIMED_OUT and result.stdout == b"x\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gather({}, into=sh("cat")), "at least one source"),
        (lambda: Gather({"a,b": say("x")}, into=sh("cat")), "not a name for a source"),
        (lambda: Gather({"a:b": say("x")}, into=sh("cat")), "not a name for a source"),
        (lambda: Gather({"": say("x")}, into=sh("cat")), "not a name for a source"),
        (lambda: Gather({"a": ["echo"]}, into=sh("cat")), "not a Stage"),
        (lambda: Gather({"a": say("x")}, into=say("x") | sh("cat")), "into"),
        (lambda: Gather({"a": say("x")}, into=sh("cat")).run(input="x"), "the consumer reads its sources"),
        (lambda: Gather({str(n): say("x") for n in range(70)}, into=sh("cat")), "at most"),
    ],
)
def test_mistakes_are_refused_in_words(make: object, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make()  # type: ignore[operator]


def test_exactly_the_sources_are_open_in_the_consumer(tmp_path: Path) -> None:
    into = sh("ls /proc/self/fd | tr '\\n' ' '")  # ls has one more, for the directory
    result = Gather({"a": say("1"), "b": say("2"), "c": say("3")}, into=into).run(timeout=SECONDS)
    assert result.text.split() == ["0", "1", "2", "3", "4", "5"]
