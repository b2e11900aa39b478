"""Receipts without runs: the log, the keys and the verifier need none."""

from __future__ import annotations

import sys
from pathlib import Path

from stockade import state
from stockade.controls import Grade
from stockade.receipt import chain, keys, tail
from stockade.receipt.statement import (
    CommandDigest,
    EvidenceSummary,
    HostFacts,
    Network,
    Predicate,
    Receipt,
    ResourceUse,
    RunEnd,
    Statement,
    Subject,
    Who,
)

WORDS = "0" * 64


def statement(
    link: chain.ChainLink, agent: str = "", outcome: str = "exited", started: str = ""
) -> Statement:
    """A run that nobody has made."""
    full = EvidenceSummary("default", "pid namespace", "namespace descriptor compared", Grade.NAMESPACES)
    weaker = EvidenceSummary(
        'limits.memory = "1G"', "RLIMIT_AS for each process only", "accepted weaker", Grade.WEAKER
    )
    return Statement(
        (Subject("stdout", {"sha256": WORDS}),),
        Predicate(
            chain=link.chain,
            sequence=link.sequence,
            previous=link.previous,
            key=link.key,
            sandbox="",
            who=Who(agent=agent),
            command=CommandDigest("true", WORDS),
            backend="native",
            policy=WORDS,
            plan=WORDS,
            filter=WORDS,
            controls={"processes": full, "limits.memory": weaker},
            evidence={},
            network=Network("none"),
            ending=RunEnd(outcome, 0),
            usage=ResourceUse(0, 0, 0, None, None, {}),
            started=started or "2026-05-01T12:00:00.000000Z",
            duration=1,
            host=HostFacts("6.18", "x86_64", 7, "0.1.0", 0),
        ),
    )


def log(home: Path) -> chain.Chain:
    """The log of a state directory, which is made where it is missing."""
    return chain.of(state.ensure(str(home)))


def append(
    home: Path, agent: str = "", outcome: str = "exited", started: str = "", *, batched: bool = False
) -> Receipt:
    """One receipt more."""
    return log(home).append(lambda link: statement(link, agent, outcome, started), batched=batched)


def public(home: Path, id: str = "") -> bytes:
    """A public key of a state directory; the current one without an id."""
    return keys.find(str(home), id).public


def main() -> None:
    """Append until killed or for so many times, and say after each that it is there.

    The newest receipts are moved into the database every few receipts, so that processes are killed then too.
    """
    home, count = Path(sys.argv[1]), int(sys.argv[2])
    tail.LONG = 10_000
    for _ in range(count):
        made = append(home, agent=sys.argv[3], batched="batched" in sys.argv[3])
        sys.stdout.write(f"{made.predicate.sequence} {made.hash}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
