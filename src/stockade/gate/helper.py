"""The operations of a plan that somebody else executes: bubblewrap, started by the gate's usher."""

from __future__ import annotations

import msgspec

from stockade.gate.plan import NODEV, NOEXEC, NOSUID, READONLY, Op, text

#: The first descriptor that a helper finds for an operation: HELD_FIRST in gate.h.
HELD_FIRST = 10
#: How many each operation needs, by its number: `needs` in usher.c.
HELD = {5: 1, 7: 2, 11: 2, 13: 1, 20: 1, 22: 1}


class Helper(Op, frozen=True, kw_only=True):
    """A program that makes the namespaces and mounts, and what it is told.

    In the arguments stand `{layer}`, where an overlay keeps its changes, and `{empty}`, an empty directory.
    """

    kind = 24
    program: str
    version: str
    arguments: tuple[str, ...]
    layer: str = ""
    empty: str = ""

    def numbers(self) -> tuple[int, int]:
        return 0, len(self.data())

    def data(self) -> bytes:
        # Whole arguments, or the beginning of a path: nothing that a policy names is touched.
        places = {"{layer}": self.layer, "{empty}": self.empty}
        told = []
        for argument in self.arguments:
            head, slash, rest = argument.partition("/")
            told.append(places.get(head, head) + slash + rest)
        return text(self.program, *told)

    def anywhere(self) -> Op:
        return msgspec.structs.replace(self, layer="", empty="")

    def describe(self) -> str:
        return f"let {self.version} make all that follows, as far as the pivot, and load the filter"


class Devices(Op, frozen=True, kw_only=True):
    kind = 25
    path: str = "/dev"
    names: tuple[str, ...]
    readonly: bool

    def numbers(self) -> tuple[int, int]:
        return NOSUID | (READONLY if self.readonly else 0), 0

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"make {self.path} with {', '.join(self.names)}, and pseudo-terminals of its own"

    def mounts(self) -> dict[str, tuple[int, str]]:
        nodes = {f"{self.path}/{name}": (self.numbers()[0], "") for name in self.names}
        own = {f"{self.path}/pts": (NOSUID | NOEXEC, "devpts")}
        return {self.path: (READONLY | NOSUID | NODEV, "tmpfs"), **nodes, **own}


def held(ops: tuple[Op, ...]) -> dict[int, int]:
    """By the number of an operation, the first descriptor that a helper finds for it."""
    found, following = {}, HELD_FIRST
    for number, op in enumerate(ops):
        if op.kind in HELD:
            found[number] = following
            following += HELD[op.kind]
    return found
