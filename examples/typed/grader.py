"""Grade answers of students: each runs in a sandbox of its own, several at once.

python grader.py
"""

from __future__ import annotations

from dataclasses import dataclass

import stockade
from stockade import Policy, SandboxExecutor, sandboxed

POLICY = Policy(limits={"wall": "30s"})


@dataclass(frozen=True)
class Grade:
    """How an answer did."""

    passed: int
    total: int


@sandboxed(POLICY, timeout=20, types=[Grade])
def grade(source: str, cases: dict[int, int]) -> Grade:
    """Run an answer, which defines `double`, and count the cases that it gets right."""
    names: dict[str, object] = {}
    exec(source, names)
    double = names["double"]
    assert callable(double)
    return Grade(sum(double(given) == wanted for given, wanted in cases.items()), len(cases))


def square(number: int) -> int:
    """Return the square of a number."""
    return number * number


def main() -> None:
    """Grade a right answer, a wrong one and one that does not end well."""
    cases = {1: 2, 5: 10}
    for answer in ("double = lambda n: n + n", "double = lambda n: n * n + 1", "double = 5 / 0"):
        try:
            done = grade(answer, cases)
            print(f"{done.passed} of {done.total}: {answer}")
        except ZeroDivisionError as error:
            print(f"failed, {error}: {answer}")
        except stockade.TimeoutError as error:
            print(f"too slow, {error.hint}: {answer}")
    with SandboxExecutor(POLICY, max_workers=2) as executor:
        print(list(executor.map(square, range(4))))


if __name__ == "__main__":
    main()
