"""`inputs`: what the consumer of a `Gather` reads, by name.

The variable `STOCKADE_INPUTS` says which name has which descriptor, as in `data:3,code:0`: pairs of a name
and a number, separated by commas. A program without Stockade opens the descriptors itself.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import BinaryIO

VARIABLE = "STOCKADE_INPUTS"


def encode(descriptors: Mapping[str, int]) -> str:
    """Return the value of the variable."""
    return ",".join(f"{name}:{number}" for name, number in descriptors.items())


class Inputs(Mapping[str, BinaryIO]):
    """The inputs of this program by name; each is opened when it is first asked for, and read as it comes.

    `stockade.inputs["data"]` is a binary file. That of the last source is `sys.stdin.buffer`.
    """

    def __init__(self) -> None:
        self._opened: dict[str, BinaryIO] = {}

    def __getitem__(self, name: str) -> BinaryIO:
        if name not in self._opened:
            number = self._descriptors()[name]
            self._opened[name] = sys.stdin.buffer if number == 0 else os.fdopen(number, "rb")
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._descriptors())

    def __len__(self) -> int:
        return len(self._descriptors())

    def __repr__(self) -> str:
        return f"<inputs {', '.join(self) or 'none'}>"

    @staticmethod
    def _descriptors() -> dict[str, int]:
        pairs = (pair.rpartition(":") for pair in os.environ.get(VARIABLE, "").split(",") if pair)
        return {name: int(number) for name, _, number in pairs}


inputs = Inputs()
