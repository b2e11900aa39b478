"""The lines of the terminal about what network rules refused."""

from __future__ import annotations

from stockade.cli.ui.network_report import refused_line
from stockade.result import Denial


def denial(target: str, hint: str = "", reason: str = "no rule") -> Denial:
    what = "connection" if ":" in target else "name"
    return Denial(what=what, target=target, wall="network.rules", clause="net", hint=hint, reason=reason)


def test_one_refusal_names_the_option_that_allows_it() -> None:
    line = refused_line([denial("evil.example", "--net evil.example")])
    assert line == "refused: the name evil.example; allow it with --net evil.example"


def test_a_refusal_says_why_unless_no_rule_is_the_reason() -> None:
    private = "the name leads to the private address 10.0.0.5"
    line = refused_line([denial("build.example:443", "--net 10.0.0.5:443", private)])
    assert line == f"refused: 1 connection to build.example:443 ({private}); allow it with --net 10.0.0.5:443"


def test_only_what_can_be_allowed_is_named_with_an_option() -> None:
    line = refused_line(
        [denial("a.example", reason="the rule !a.example denies it"), denial("b.example", "--net b.example")]
    )
    assert line.endswith(
        "(the rule !a.example denies it), the name b.example; allow b.example with --net b.example"
    )


def test_many_refusals_are_one_line() -> None:
    line = refused_line([denial(f"n{number}.example", f"--net n{number}.example") for number in range(9)])
    assert " and 6 more; allow the first 3 with --net n0.example --net n1.example --net n2.example" in line
