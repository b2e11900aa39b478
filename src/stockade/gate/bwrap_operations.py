"""The operations of a plan that bubblewrap executes, started by the gate's usher."""

from __future__ import annotations

import msgspec

from stockade.gate import wire
from stockade.gate.operations import NODEV, NOEXEC, NOSUID, READONLY, Op, text

#: How many descriptors the helper finds for an operation, by its number: `needs` in usher.c.
HELD = {
    wire.OP_FILE: wire.HELD_BY_FILE,
    wire.OP_BIND: wire.HELD_BY_BIND,
    wire.OP_OVERLAY: wire.HELD_BY_OVERLAY,
    wire.OP_VIEW: wire.HELD_BY_VIEW,
    wire.OP_SECCOMP: wire.HELD_BY_SECCOMP,
    wire.OP_CGROUP: wire.HELD_BY_CGROUP,
}


class Helper(Op, frozen=True, kw_only=True):
    """The program that makes the namespaces and mounts, and its arguments.

    `{layer}` in an argument stands for the place where an overlay keeps its changes, `{empty}` for an empty
    directory.
    """

    kind = wire.OP_HELPER
    program: str
    version: str
    arguments: tuple[str, ...]
    layer: str = ""
    empty: str = ""

    def numbers(self) -> tuple[int, int]:
        return 0, len(self.data())

    def data(self) -> bytes:
        # Only whole arguments and the beginning of a path are replaced, so nothing that a policy names is.
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
    kind = wire.OP_DEVICES
    path: str = "/dev"
    names: tuple[str, ...]
    readonly: bool

    def numbers(self) -> tuple[int, int]:
        return NOSUID | (READONLY if self.readonly else 0), 0

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        terminals = f"{wire.MOST_TERMINALS} pseudo-terminals of its own"
        return f"make {self.path} with {', '.join(self.names)}, and {terminals}"

    def mounts(self) -> dict[str, tuple[int, str]]:
        nodes = {f"{self.path}/{name}": (self.numbers()[0], "") for name in self.names}
        own = {f"{self.path}/pts": (NOSUID | NOEXEC, "devpts")}
        return {self.path: (READONLY | NOSUID | NODEV, "tmpfs"), **nodes, **own}


class Placement(Op, frozen=True, kw_only=True):
    """Moves a mount from private memory into a tree of the host, without following a link on the way."""

    kind = wire.OP_PLACE
    path: str
    number: int

    @property
    def staged(self) -> str:
        """The path at which the helper mounts it."""
        return f"{wire.STAGING}/{self.number}"

    def numbers(self) -> tuple[int, int]:
        return self.number, 0

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"move the mount for {self.path} there, following no link"


def held(ops: tuple[Op, ...]) -> dict[int, int]:
    """Return, by the place of an operation in a plan, the first descriptor that a helper finds for it."""
    found, following = {}, wire.HELD_FIRST
    for number, op in enumerate(ops):
        if op.kind in HELD:
            found[number] = following
            following += HELD[op.kind]
    return found
