"""What a test runner reported: JUnit XML and TAP, read from hostile bytes.

The code under test runs in the process that writes the report, so the report may hold anything. Only its
test ids and their outcomes are read. Size, depth, count and the length of an id are bounded; a document type
declaration, and with it every entity, is refused.
"""

from __future__ import annotations

import re
from typing import Literal
from xml.parsers import expat

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line

TestOutcome = Literal["passed", "failed", "skipped"]

#: The most bytes, tests and nested elements of a report, and characters of a test's id.
MOST_BYTES = 16 << 20
MOST_TESTS = 100_000
MOST_DEPTH = 64
MOST_ID = 1000
#: The most bytes of all attributes of one element.
MOST_ATTRIBUTES = 1 << 20

_RANK: dict[TestOutcome, int] = {"skipped": 0, "passed": 1, "failed": 2}


class ReportError(StockadeError):
    """The bytes are not a test report that can be relied on."""


class Report(msgspec.Struct, frozen=True):
    """The tests that a runner reported, by id. An id that occurs twice has the worst of its outcomes."""

    tests: dict[str, TestOutcome]


def read_report(data: bytes) -> Report:
    """Read JUnit XML or TAP 13 or 14, whichever the bytes are. Raises `ReportError` and nothing else.

    The id of a test is `CLASSNAME::NAME` in JUnit XML and its description in TAP.

    >>> read_report(b"TAP version 13\\n1..2\\nok 1 - adds\\nnot ok 2 - divides # TODO later").tests
    {'adds': 'passed', 'divides': 'skipped'}
    """
    if len(data) > MOST_BYTES:
        raise ReportError(
            f"the report has more than {MOST_BYTES >> 20} MiB",
            hint="let the runner report test names without their output",
        )
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<":
        return Report(_JUnit().read(data))
    return Report(_Tap().read(data))


class _Tests:
    """The outcomes so far, bounded."""

    def __init__(self) -> None:
        self.outcomes: dict[str, TestOutcome] = {}

    def add(self, name: str, outcome: TestOutcome) -> None:
        name = clean_line(name.strip()[:MOST_ID])
        before = self.outcomes.get(name)
        if before is None and len(self.outcomes) >= MOST_TESTS:
            raise ReportError(f"the report names more than {MOST_TESTS} tests", hint="split the test run")
        if before is None or _RANK[outcome] > _RANK[before]:
            self.outcomes[name] = outcome


class _JUnit:
    """Reads `<testcase>` elements, wherever the runner nests them."""

    def __init__(self) -> None:
        self._tests = _Tests()
        self._open: list[str] = []
        #: The id and outcome of the test case that is being read, and how deep its element lies.
        self._case: tuple[str, TestOutcome, int] | None = None

    def read(self, data: bytes) -> dict[str, TestOutcome]:
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        try:
            parser.Parse(data, True)
        except expat.ExpatError as error:
            reason = expat.errors.messages.get(error.code, "not well-formed")
            raise ReportError(
                f"the report is not XML: line {error.lineno}, column {error.offset}: {reason}",
                hint="a runner that was ended early leaves such a file",
            ) from None
        except (ValueError, LookupError) as error:  # an encoding that Python does not know
            raise ReportError(f"the report is not XML: {clean_line(str(error)[:200])}") from None
        return self._tests.outcomes

    def _refuse_doctype(self, *_: object) -> None:
        raise ReportError(
            "the report has a document type declaration, which no test runner writes",
            hint="write JUnit XML without <!DOCTYPE ...>",
        )

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._open and tag not in ("testsuites", "testsuite"):
            raise ReportError(
                f"the report is XML, and not JUnit's: it begins with <{clean_line(tag[:40])}>",
                hint="let the runner write JUnit XML: <testsuites><testsuite><testcase .../>",
            )
        self._open.append(tag)
        if len(self._open) > MOST_DEPTH:
            raise ReportError(f"the report is nested more than {MOST_DEPTH} deep")
        if sum(map(len, attributes.values())) > MOST_ATTRIBUTES:
            raise ReportError(f"an element of the report has more than {MOST_ATTRIBUTES >> 20} MiB")
        if tag == "testcase":
            place = attributes.get("classname") or attributes.get("file") or ""
            name = attributes.get("name", "")
            outcome: TestOutcome = "skipped" if attributes.get("status") == "notrun" else "passed"
            self._case = (f"{place}::{name}" if place else name, outcome, len(self._open))
        elif self._case and len(self._open) == self._case[2] + 1:
            name, outcome, depth = self._case
            if tag in ("failure", "error"):
                self._case = (name, "failed", depth)
            elif tag == "skipped" and outcome == "passed":
                self._case = (name, "skipped", depth)

    def _end(self, _tag: str) -> None:
        if self._case and len(self._open) == self._case[2]:
            self._tests.add(*self._case[:2])
            self._case = None
        self._open.pop()


_RESULT = re.compile(r"(not )?ok\b(.*)", re.DOTALL)
_PLAN = re.compile(r"1\.\.(\d{1,9})(?:\s*#\s*(.*))?\s*\Z")
_DIRECTIVE = re.compile(r"(?<!\\)#\s*(skip|todo)", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(\d{1,9})?\s*(?:-\s*)?(.*)", re.DOTALL)


class _Tap:
    """Reads test lines and the plan of TAP; subtests are summed up by the line that follows them."""

    def __init__(self) -> None:
        self._tests = _Tests()
        self._lines = 0
        self._planned: int | None = None
        self._seen: dict[str, int] = {}

    def read(self, data: bytes) -> dict[str, TestOutcome]:
        for raw in data.decode("utf-8", "replace").split("\n"):
            self._line(raw.rstrip("\r"))
        if self._planned is None:
            raise ReportError(
                "the report is neither JUnit XML nor TAP: it has no plan such as 1..3",
                hint="let the runner write JUnit XML (pytest --junitxml=FILE) or TAP with a plan",
            )
        if self._planned != self._lines:
            raise ReportError(
                f"the report is incomplete: {self._planned} tests were planned and {self._lines} reported",
                hint="a runner that was ended early leaves such a report",
            )
        return self._tests.outcomes

    def _line(self, line: str) -> None:
        # YAML of a test, between --- and ..., and subtests are indented.
        if line.startswith((" ", "\t")):
            return
        if line.startswith("Bail out!"):
            raise ReportError(f"the runner gave up: {clean_line(line[:200])}")
        if plan := _PLAN.match(line):
            if self._planned is not None:
                raise ReportError("the report has two plans", hint="write one report for one run")
            self._planned = int(plan[1])
        elif result := _RESULT.match(line):
            self._result(bool(result[1]), result[2])

    def _result(self, failed: bool, rest: str) -> None:
        self._lines += 1
        directive = _DIRECTIVE.search(rest)
        words = _NUMBER.match(rest[: directive.start()] if directive else rest)
        number, title = (words[1], words[2].strip()[:MOST_ID]) if words else (None, "")
        # The description is the id: numbers move when a test is added before.
        name = title or number or str(self._lines)
        seen = self._seen[name] = self._seen.get(name, 0) + 1
        outcome: TestOutcome = "failed" if failed else "passed"
        if directive and (failed or directive[1].lower() == "skip"):
            outcome = "skipped"
        self._tests.add(name if seen == 1 else f"{name} [{seen}]", outcome)
