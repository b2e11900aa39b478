"""Fuzzing in Python: mutations of a corpus, until the time is over. A failure prints its seed and input."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

SEED = int(os.environ.get("STOCKADE_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)


def mutate(data: bytes, chance: random.Random, corpus: list[bytes], words: Sequence[bytes]) -> bytes:
    """Return the data with a few changes: bytes, pieces of itself, of its siblings, and of a dictionary."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(changed) + 1)
        if chance.random() < 0.3:
            # Where a line begins, so that whole headers come and go.
            at = changed.find(b"\n", at) + 1
        end = min(len(changed), at + chance.choice((1, 2, 4, 16, 64)))
        match chance.randrange(7):
            case 0:
                changed[at:end] = b""
            case 1:
                changed[at:at] = changed[at:end]
            case 2:
                changed[at:at] = chance.choice(words)
            case 3:
                changed[at:end] = chance.choice(words)
            case 4 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 5 if at < len(changed):
                changed[at] = chance.choice((0, 1, changed[at] + 1 & 255, changed[at] - 1 & 255, 255))
            case _:
                other = chance.choice(corpus)
                begin = chance.randrange(len(other) + 1)
                changed[at:at] = other[begin : begin + 64]
    return bytes(changed[:200_000])


def pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Cut the data at random places."""
    size = chance.choice((1, 3, 20, max(1, len(data))))
    found, at = [], 0
    while at < len(data):
        end = at + chance.randint(1, size)
        found.append(data[at:end])
        at = end
    return found


def run_fuzzer(
    corpus: list[bytes],
    examine: Callable[[bytes, random.Random], bool],
    words: Sequence[bytes],
    seconds: float,
) -> None:
    """Examine mutations of the corpus until the time is over; inputs that examine() likes join the corpus.

    `words` is the dictionary: pieces of bytes that mean something to the parser.
    """
    chance = random.Random(SEED)
    corpus, first = list(corpus), len(corpus)
    end, count, longest = time.monotonic() + seconds, 0, 0.0
    while time.monotonic() < end:
        data = mutate(chance.choice(corpus), chance, corpus, words)
        began = time.thread_time()
        try:
            good = examine(data, chance)
        except BaseException:
            print(f"STOCKADE_FUZZ_SEED={SEED}, input number {count}: {data!r}")
            raise
        longest = max(longest, time.thread_time() - began)
        count += 1
        if good and data not in corpus:
            if len(corpus) < first + 200:
                corpus.append(data)
            else:
                corpus[chance.randrange(first, len(corpus))] = data
    assert count > 20
    assert longest < 2
