"""Pipelines as TOML files: what is read, and how mistakes are named."""

from __future__ import annotations

import pytest

from stockade import Gather, Pipeline, PolicyError
from stockade.pipeline.pipeline_file import parse_pipeline

TWO = '[[stage]]\ncommand = ["a"]\n[[stage]]\ncommand = ["b"]\n'


def test_stages_in_a_row_with_their_own_policies() -> None:
    text = """
        name = "report"
        timeout = "5m"
        pipefail = true
        [[stage]]
        command = ["fetch", "all"]
        policy = { net = ["api.example.com"], read = ["data"] }
        env = { LANG = "C" }
        [[stage]]
        command = ["parse"]
        """
    found = parse_pipeline(text, "p.toml", "/base")
    assert isinstance(found.stages, Pipeline) and found.timeout == "5m"
    assert (found.stages.name, found.stages.pipefail) == ("report", True)
    first, second = found.stages.stages
    assert first.command == ["fetch", "all"] and first.options == {"env": {"LANG": "C"}}
    assert first.policy.read == ("/base/./data",) and not second.policy.net


def test_sources_and_a_consumer() -> None:
    text = """
        [source.data]
        command = ["a"]
        [[source.code.stage]]
        command = ["b"]
        [[source.code.stage]]
        command = ["c"]
        [consumer]
        command = ["d"]
        """
    found = parse_pipeline(text, "p.toml", "/base")
    assert isinstance(found.stages, Gather)
    assert [one.place for one in found.stages.placed] == [
        "source-data", "source-code-stage-0", "source-code-stage-1", "consumer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("timeuot = 1\n" + TWO, "p.toml: there is no key 'timeuot'", "did you mean timeout?"),
        ("", "p.toml has neither stages nor sources", "[[stage]]"),
        (TWO + '[consumer]\ncommand = ["x"]', "or both", "[[stage]]"),
        ('[[stage]]\ncommand = ["a"]', "p.toml: a pipeline needs at least two stages", "run"),
        ("stage = 1", "p.toml: stage is not a list of tables", "[[stage]]"),
        ("stage = [1, 2]", "p.toml: stage 0 is not a table", "[[stage]]"),
        ('[[stage]]\ncmd = ["a"]\n', "p.toml: stage 0: there is no key 'cmd'", "command"),
        ('[[stage]]\ncommand = "a b"\n', "p.toml: stage 0: command is not a list of words", "sort"),
        ("[[stage]]\ncommand = []\n", "p.toml: stage 0: command is not a list of words", "sort"),
        (TWO + "policy = { nett = [] }\n", "p.toml: stage 1: ", "net"),
        (TWO + "policy = 3\n", "p.toml: stage 1: policy is neither", ""),
        (TWO + 'stdin = "no-such-file"\n', "p.toml: stage 1: cannot read 'no-such-file'", ""),
        (TWO + "env = { A = 1.5 }\n", "p.toml: stage 1: env: A", ""),
        ("timeout = []\n" + TWO, "p.toml: timeout is not a time", "5m"),
        ("name = 1\n" + TWO, "p.toml: name is not text", ""),
        ('pipefail = "no"\n' + TWO, "p.toml: pipefail is neither true nor false", ""),
        ('[source."a,b"]\ncommand = ["x"]\n[consumer]\ncommand = ["x"]', "'a,b' is not a name", "comma"),
        ('[source."a:b"]\ncommand = ["x"]\n[consumer]\ncommand = ["x"]', "'a:b' is not a name", "colon"),
        ('[source.a]\ncommand = ["x"]\n', "p.toml: sources need a consumer", "[consumer]"),
        ("[source]\n[consumer]\ncommand = ['x']", "p.toml: a Gather needs at least one source", ""),
        ('[[stage]]\ncommand = ["a', "p.toml", ""),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, message: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_pipeline(text, "p.toml", "/no/such/base")
    assert message in caught.value.message and hint in caught.value.hint
