"""JUnit XML and TAP, from honest and hostile runners."""

from __future__ import annotations

import pytest

from stockade.loop.reports import ReportError, read_report

PYTEST = b"""<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest">
<testcase classname="tests.test_a" name="test_adds" time="0.001" />
<testcase classname="tests.test_a" name="test_fails[1-&lt;]" ><failure message="no">E</failure></testcase>
<testcase classname="tests.test_a" name="test_errs" time="0"><error message="on setup"/></testcase>
<testcase classname="tests.test_a" name="test_later"><skipped type="pytest.skip">why</skipped></testcase>
</testsuite></testsuites>"""


def test_pytests_report_is_read() -> None:
    assert read_report(PYTEST).tests == {
        "tests.test_a::test_adds": "passed",
        "tests.test_a::test_fails[1-<]": "failed",
        "tests.test_a::test_errs": "failed",
        "tests.test_a::test_later": "skipped",
    }


def test_nested_suites_files_and_statuses_of_other_runners_are_read() -> None:
    report = b"""<testsuite><testsuite><testcase file="a.js" name="one"/>
        <testcase name="two" status="notrun"/><testcase classname="C" name="three">
        <system-out><failure/></system-out></testcase></testsuite></testsuite>"""
    assert read_report(report).tests == {"a.js::one": "passed", "two": "skipped", "C::three": "passed"}


def test_a_test_that_is_reported_twice_has_the_worse_outcome() -> None:
    twice = b'<testsuite><testcase name="a"><failure/></testcase><testcase name="a"/></testsuite>'
    assert read_report(twice).tests == {"a": "failed"}


TAP = b"""TAP version 14
1..6
ok 1 - adds
not ok 2 - divides
  ---
  message: "not ok 9 - in YAML"
  ...
# Subtest: inner
    ok 1 - inside
    1..1
ok 3 - inner
ok 4 - on windows # SKIP no windows
not ok 5 - soon # TODO later
ok
"""


def test_tap_is_read() -> None:
    assert read_report(TAP).tests == {
        "adds": "passed",
        "divides": "failed",
        "inner": "passed",
        "on windows": "skipped",
        "soon": "skipped",
        "6": "passed",
    }


def test_tests_of_tap_with_one_description_are_told_apart() -> None:
    assert read_report(b"1..2\nok 1 - a\nnot ok 2 - a\n").tests == {"a": "passed", "a [2]": "failed"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither JUnit XML nor TAP"),
        (b"all tests passed", "neither JUnit XML nor TAP"),
        (b"\xff\xfe\x00", "neither JUnit XML nor TAP"),
        (b"1..3\nok 1\n", "3 tests were planned and 1 reported"),
        (b"1..1\nok 1\n1..1\n", "two plans"),
        (b"1..2\nok 1\nBail out! \x1b[31mdatabase\n", r"gave up: Bail out! \\x1b\[31mdatabase"),
        (PYTEST[:-30], "not XML: line 5, column"),
        (b"<html/>", "not JUnit's: it begins with <html>"),
        (b"<testsuite>&unknown;</testsuite>", "not XML: line 1"),
        (b'<?xml version="1.0" encoding="wat"?><testsuite/>', "not XML"),
        (b"<testsuite>" * 100, "nested more than 64 deep"),
        (b"<testsuite>" + b"".join(b'<testcase name="%d"/>' % n for n in range(100_001)), "more than 100000"),
        (b" " * ((16 << 20) + 1), "more than 16 MiB"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        read_report(data)


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1 if n > 1 else str()};" * 10}">' for n in range(1, 10))
    + "]><testsuite><testcase name='&a9;'/></testsuite>"
)


@pytest.mark.parametrize(
    "document",
    [
        BOMB,
        '<!DOCTYPE t SYSTEM "file:///etc/passwd"><testsuite/>',
        '<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><testsuite><testcase name="&x;"/></testsuite>',
        '<!DOCTYPE t [<!ENTITY % p SYSTEM "http://127.0.0.1/"> %p;]><testsuite/>',
        '<!DOCTYPE t [<!ATTLIST testcase name CDATA "made-up">]><testsuite><testcase/></testsuite>',
    ],
)
def test_a_document_type_and_with_it_every_entity_is_refused(document: str) -> None:
    for encoding in ("utf-8", "utf-16"):
        if encoding == "utf-16" and not document.startswith("<!"):
            continue
        with pytest.raises(ReportError):
            read_report(document.encode(encoding))
    with pytest.raises(ReportError, match="document type declaration"):
        read_report(document.encode())


def test_ids_are_clean_and_bounded() -> None:
    name = "x" * 5000 + "&#x9b;"
    (one, two) = read_report(
        f'<testsuite><testcase name="&#x202e;a"/><testcase name="{name}"/></testsuite>'.encode()
    ).tests
    assert one == "\\u202ea" and len(two) == 1000
