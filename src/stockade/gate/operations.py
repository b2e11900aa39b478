"""A plan: the ordered operations that raise the walls, as values that nothing has executed yet.

Every operation can say in words what it does, which clause of the policy it
serves and what must be observed afterwards, and can write itself down as the
record that the gate reads. The numbers and shapes are those of `gate/src/wire.h`.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import msgspec

from stockade.gate import wire

NAMESPACES = {
    "user": 0x10000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "cgroup": 0x02000000,
}
RESOURCES = {"cpu_time": 0, "file_size": 1, "data": 2, "core": 4, "tasks": 6, "files": 7, "memory": 9}
#: The capabilities that root inside can keep, by their numbers: wire.KEEPABLE.
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
#: Landlock's rights to TCP ports, since ABI 4.
BIND_TCP, CONNECT_TCP = 1, 2

READONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
ATTRIBUTES = {READONLY: b"ro", NOSUID: b"nosuid", NODEV: b"nodev", NOEXEC: b"noexec"}


def _without_exec(noexec: bool) -> str:
    return ", nothing in it to be executed" if noexec else ""


class Op(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """One operation. `clause` is the part of the policy it serves."""

    kind: ClassVar[int]
    clause: str = "always"

    def numbers(self) -> tuple[int, int]:
        """Return the two numbers of its record."""
        return 0, 0

    def data(self) -> bytes:
        """Return the strings and the blob of its record."""
        return b""

    def describe(self) -> str:
        """Say in words what it does."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    def anywhere(self) -> Op:
        """Return the same operation without the places where Stockade keeps its state."""
        return self

    def mounts(self) -> dict[str, tuple[int, str]]:
        """Return what the mount table must show: by mount point, attributes and type (empty: any)."""
        return {}

    def record(self) -> bytes:
        data = self.data()
        size = wire.PLAN_RECORD.size + len(data) + 7 & ~7
        head = wire.PLAN_RECORD.pack(self.kind, size, *self.numbers())
        return head + data.ljust(size - len(head), b"\0")


def text(*parts: str) -> bytes:
    """Return strings as a record holds them. File names need not be UTF-8."""
    return b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in parts)


class Namespaces(Op, frozen=True, kw_only=True):
    kind = wire.OP_NAMESPACES
    names: tuple[str, ...]
    every_id: bool
    #: The program that makes them and the mounts; empty if the gate does.
    helper: str = ""
    #: Rows of the id maps: the first id inside, the first one outside and how many. Empty: every id or the
    #: caller's own, as `every_id` says. `group_ids` are those of groups; empty: the same as of users.
    ids: tuple[tuple[int, int, int], ...] = ()
    group_ids: tuple[tuple[int, int, int], ...] = ()
    #: The network namespace is not a new one: the last descriptor of the launch is that of a living sandbox.
    joins_network: bool = False
    #: Programs may join multicast groups in it, but few.
    few_memberships: bool = False

    @property
    def maps(self) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]:
        """The rows for users and those for groups."""
        return self.ids, self.group_ids or self.ids

    def flags(self) -> int:
        return sum(NAMESPACES[name] for name in self.names)

    def numbers(self) -> tuple[int, int]:
        users, groups = self.maps
        return self.flags(), (
            (wire.MAPS_EVERY_ID if self.every_id and not users else 0)
            | (wire.MADE_BY_HELPER if self.helper else 0)
            | (wire.JOINS_NETWORK if self.joins_network else 0)
            | (wire.FEW_MEMBERSHIPS if self.few_memberships else 0)
            | len(users) << wire.USER_ROWS_AT
            | len(groups) << wire.GROUP_ROWS_AT
        )

    def data(self) -> bytes:
        return b"".join(wire.ID_ROW.pack(*row) for rows in self.maps for row in rows)

    def describe(self) -> str:
        if not self.names:
            return "start a warden, and the gate below it; each ends everything if the other dies"
        by = f", made by {self.helper}" if self.helper else ""
        names = [name for name in self.names if name != "net" or not self.joins_network]
        joins = "; join the network namespace of a living sandbox" if self.joins_network else ""
        few = (
            f"; let a socket join at most {wire.MOST_MEMBERSHIPS} IPv4 multicast groups"
            if self.few_memberships
            else ""
        )
        maps = f"the user namespace maps {self._mapped()}"
        return f"enter new namespaces{by}: {', '.join(names)}; {maps}{joins}{few}"

    def _mapped(self) -> str:
        users, groups = self.maps
        if not users:
            return "every id as it is" if self.every_id else "the caller's own ids and no other"
        if users == groups:
            return f"ids {_rows(users)}"
        return f"users {_rows(users)}; groups {_rows(groups)}"


def _rows(rows: tuple[tuple[int, int, int], ...]) -> str:
    return ", ".join(
        f"{inside} to {outside}"
        if count == 1
        else f"{inside}-{inside + count - 1} to {outside}-{outside + count - 1}"
        for inside, outside, count in rows
    )


class Hostname(Op, frozen=True, kw_only=True):
    kind = wire.OP_HOSTNAME
    name: str

    def data(self) -> bytes:
        return text(self.name)

    def describe(self) -> str:
        return f"call the machine {self.name}"


class Root(Op, frozen=True, kw_only=True):
    kind = wire.OP_ROOT
    size: int = 0
    inodes: int = 0

    def numbers(self) -> tuple[int, int]:
        return self.size, self.inodes

    def describe(self) -> str:
        most = f" of at most {self.size} bytes and {self.inodes} files" if self.size else ""
        return f"begin with an empty root in private memory{most}"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {"/": (READONLY | NOSUID | NODEV, "tmpfs")}


class Image(Op, frozen=True, kw_only=True):
    """A file system in a file of Stockade's state; `descriptor` + 1 is its mount."""

    kind = wire.OP_IMAGE
    size: int
    descriptor: int

    def numbers(self) -> tuple[int, int]:
        return self.size, self.descriptor

    def describe(self) -> str:
        return f"take a file system of {self.size} bytes, in a file of Stockade's state, for what is written"


class Dir(Op, frozen=True, kw_only=True):
    kind = wire.OP_DIR
    path: str
    mode: int = 0o755

    def numbers(self) -> tuple[int, int]:
        return self.mode, 0

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"make the directory {self.path}"


class File(Op, frozen=True, kw_only=True):
    kind = wire.OP_FILE
    path: str
    content: bytes
    mode: int = 0o444

    def numbers(self) -> tuple[int, int]:
        return self.mode, len(self.content)

    def data(self) -> bytes:
        return text(self.path) + self.content

    def describe(self) -> str:
        return f"write {self.path} ({len(self.content)} bytes, made by Stockade)"


class Symlink(Op, frozen=True, kw_only=True, tag="link"):
    kind = wire.OP_LINK
    path: str
    target: str

    def data(self) -> bytes:
        return text(self.path, self.target)

    def describe(self) -> str:
        return f"link {self.path} → {self.target}"


class Bind(Op, frozen=True, kw_only=True):
    """Shows a file or tree of the host. `grant` is the descriptor + 1 it was judged by, 0 for none.

    An `own` one belongs to the sandbox: it is in Stockade's state, and only the sandbox uses it.
    """

    kind = wire.OP_BIND
    path: str
    source: str
    writable: bool = False
    device: bool = False
    noexec: bool = False
    grant: int = 0
    own: bool = False

    def attributes(self) -> int:
        if self.device:
            # Read-only keeps the host's node from being changed; what it leads to stays writable.
            return READONLY | NOSUID | NOEXEC
        return NOSUID | NODEV | (0 if self.writable else READONLY) | (NOEXEC if self.noexec else 0)

    def numbers(self) -> tuple[int, int]:
        return self.attributes(), self.grant

    def data(self) -> bytes:
        return text(self.path, self.source)

    def describe(self) -> str:
        how = "the device" if self.device else "writable" if self.writable else "read-only"
        how += _without_exec(self.noexec)
        if self.own:
            return f"show {self.path} {how}, a directory of the sandbox's own"
        origin = "" if self.source == self.path else f" from {self.source}"
        return f"show {self.path} {how}{origin}"

    def anywhere(self) -> Op:
        return msgspec.structs.replace(self, source="") if self.own else self

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (self.attributes(), "")}


class ScratchMount(Op, frozen=True, kw_only=True, tag="scratch"):
    kind = wire.OP_SCRATCH
    path: str
    mode: int
    noexec: bool = False
    #: On the image that comes before.
    image: bool = False

    def numbers(self) -> tuple[int, int]:
        return self.mode, NOEXEC if self.noexec else 0

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        where = "in that file system" if self.image else "in private memory"
        return f"make {self.path} an empty writable directory {where}{_without_exec(self.noexec)}"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (NOSUID | NODEV | self.numbers()[1], "ext4" if self.image else "tmpfs")}


class Proc(Op, frozen=True, kw_only=True):
    kind = wire.OP_PROC
    path: str = "/proc"

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"mount {self.path} of the sandbox's own processes, read-only"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (READONLY | NOSUID | NODEV | NOEXEC, "proc")}


class Pts(Op, frozen=True, kw_only=True):
    kind = wire.OP_PTS
    path: str = "/dev/pts"

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"mount {self.path} with {wire.MOST_TERMINALS} pseudo-terminals of its own"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (NOSUID | NOEXEC, "devpts")}


class Overlay(Op, frozen=True, kw_only=True):
    """`layer` is the directory of the state that receives the changes, `masks` the number of its masks.

    Those of a `private` one are in the private file system until the sandbox has ended, or in the `image`.
    `alone` says that the descriptor is a mount of its own, without what is mounted in it.
    """

    kind = wire.OP_OVERLAY
    path: str
    #: The directory of the host below it; empty if it has the same path.
    source: str = ""
    layer: str
    grant: int
    masks: int = 0
    noexec: bool = False
    private: bool = False
    image: bool = False
    alone: bool = False
    #: Mounted by a helper that sets no attributes; in a user namespace no device in it can be opened anyway.
    bare: bool = False

    def numbers(self) -> tuple[int, int]:
        attributes = NOEXEC << 32 if self.noexec else 0
        masks = self.masks | (wire.OVERLAY_PRIVATE if self.private else 0) | attributes
        return masks, self.grant | (wire.SOURCE_ALONE if self.alone else 0)

    def data(self) -> bytes:
        source = self.source or self.path
        if self.private:
            return text(self.path, source, "/", "/")
        return text(self.path, source, f"{self.layer}/upper", f"{self.layer}/work")

    def anywhere(self) -> Op:
        return msgspec.structs.replace(self, layer="", source="")

    def describe(self) -> str:
        how = f"copy-on-write{_without_exec(self.noexec)}"
        if self.image:
            return f"show {self.path} {how}: changes go to that file system, and are in Stockade's state"
        if self.private:
            return (
                f"show {self.path} {how}: changes go to private memory, and to Stockade's state when the "
                "sandbox ends; a killed supervisor loses them"
            )
        return f"show {self.path} {how}: changes go to Stockade's state, not to the host"

    def mounts(self) -> dict[str, tuple[int, str]]:
        attributes = 0 if self.bare else NOSUID | NODEV | (NOEXEC if self.noexec else 0)
        return {self.path: (attributes, "overlay")}


class Show(Op, frozen=True, kw_only=True):
    kind = wire.OP_SHOW
    path: str

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        return f"show {self.path} as prepared, read-only"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (READONLY | NOSUID | NODEV, "")}


class View(Op, frozen=True, kw_only=True):
    """Shows a directory of the host read-only, without the sockets in it.

    `grant` is as for Bind, `alone` as for Overlay.
    """

    kind = wire.OP_VIEW
    path: str
    source: str
    grant: int = 0
    masks: int = 0
    alone: bool = False

    def numbers(self) -> tuple[int, int]:
        return self.masks, self.grant | (wire.SOURCE_ALONE if self.alone else 0)

    def data(self) -> bytes:
        return text(self.path, self.source)

    def describe(self) -> str:
        return f"show {self.path} read-only; sockets in it cannot be connected to"

    def mounts(self) -> dict[str, tuple[int, str]]:
        return {self.path: (READONLY | NOSUID | NODEV, "overlay")}


class Pivot(Op, frozen=True, kw_only=True):
    kind = wire.OP_PIVOT

    def describe(self) -> str:
        return "seal the root read-only, move into it and let go of the host's"


class Keyring(Op, frozen=True, kw_only=True):
    kind = wire.OP_KEYRING

    def describe(self) -> str:
        return "replace the session keyring by an empty one"


class Limit(Op, frozen=True, kw_only=True):
    kind = wire.OP_RLIMIT
    resource: str
    value: int

    def numbers(self) -> tuple[int, int]:
        return RESOURCES[self.resource], self.value

    def describe(self) -> str:
        whose = " in each process" if self.resource in ("memory", "cpu_time", "data") else ""
        return f"limit {self.resource} to {self.value}{whose}"


class Privileges(Op, frozen=True, kw_only=True):
    """`keep` is the mask of the capabilities that root inside keeps, over mapped ids only."""

    kind = wire.OP_PRIVILEGES
    keep: int = 0

    def numbers(self) -> tuple[int, int]:
        return self.keep, 0

    def describe(self) -> str:
        what = "every capability"
        if self.keep:
            kept = [name for name, number in CAPABILITIES.items() if self.keep >> number & 1]
            what += f" but {', '.join(kept)} over mapped ids"
        return f"drop {what} for good, set no_new_privs, become unreadable to debuggers"


class LandlockRules(Op, frozen=True, kw_only=True, tag="landlock"):
    kind = wire.OP_LANDLOCK
    files: int
    network: int = 0
    scopes: int = 0

    def numbers(self) -> tuple[int, int]:
        return self.files, self.network | self.scopes << 32

    def describe(self) -> str:
        ports = ", and every TCP port" if self.network else ""
        scopes = "; signals and abstract sockets stay inside" if self.scopes else ""
        return f"let Landlock refuse every file that is not granted below{ports}{scopes}"


class BindGrant(Op, frozen=True, kw_only=True, tag="grant"):
    """`grant` is the descriptor + 1 that stands for the path, 0 for none; `gate`: not for programs."""

    kind = wire.OP_GRANT
    path: str
    rights: int
    words: str
    grant: int = 0
    gate: bool = False

    def numbers(self) -> tuple[int, int]:
        return self.rights, self.grant | (wire.GRANT_GATE if self.gate else 0)

    def data(self) -> bytes:
        return text(self.path)

    def describe(self) -> str:
        whom = " the gate alone" if self.gate else ""
        return f"grant{whom} {self.path}: {self.words}"


class PortGrant(Op, frozen=True, kw_only=True, tag="port"):
    kind = wire.OP_PORT
    port: int

    def numbers(self) -> tuple[int, int]:
        return CONNECT_TCP, self.port

    def describe(self) -> str:
        return f"grant TCP connections to port {self.port}"


class Observe(Op, frozen=True, kw_only=True):
    """Starts the observer, which answers the calls that the filter after it notifies.

    `program` is the ordinary filter: what that refuses, the observer refuses.
    """

    kind = wire.OP_OBSERVE
    program: bytes
    everything: bool = False

    def numbers(self) -> tuple[int, int]:
        return wire.OBSERVE_EVERYTHING if self.everything else wire.OBSERVE_REFUSALS, len(self.program)

    def data(self) -> bytes:
        return self.program

    def describe(self) -> str:
        what = "everything" if self.everything else "whatever is refused"
        return f"start the observer, which writes down {what}"


class Seccomp(Op, frozen=True, kw_only=True):
    kind = wire.OP_SECCOMP
    program: bytes

    def numbers(self) -> tuple[int, int]:
        return 0, len(self.program)

    def data(self) -> bytes:
        return self.program

    def describe(self) -> str:
        return f"install the system call filter ({len(self.program) // 8} instructions)"


class Mask(Op, frozen=True, kw_only=True):
    """Hides a name in the tree that an Overlay or View after it shows: `masks` says in which.

    A name, not a file: it stays hidden when the host puts another file there.
    """

    kind = wire.OP_MASK
    path: str
    tree: str
    source: str
    masks: int
    grant: int = 0

    def numbers(self) -> tuple[int, int]:
        return self.masks, self.grant

    def data(self) -> bytes:
        return text(self.path, self.tree, self.source)

    def describe(self) -> str:
        return f"hide {self.path}, whatever the host has or puts there"


class JoinCgroup(Op, frozen=True, kw_only=True, tag="cgroup"):
    """`descriptor` + 1 is that of the file or directory through which the gate enters."""

    kind = wire.OP_CGROUP
    version: int
    descriptor: int
    limits: str

    def numbers(self) -> tuple[int, int]:
        return self.version, self.descriptor

    def describe(self) -> str:
        return f"enter a cgroup (version {self.version}) that limits {self.limits}"


class Plan(msgspec.Struct, frozen=True, dict=True):
    """The compiled policy for one backend.

    The first operation makes the namespaces. The `base` ones after it build
    the part of the root that sandboxes of one profile share read-only; the
    gate does that once and keeps the result.
    """

    backend: str
    base: int
    ops: tuple[Op, ...]

    @cached_property
    def encoded(self) -> bytes:
        """The plan as the gate reads it."""
        return encode(self.ops, self.base)

    @property
    def fits(self) -> bool:
        """Whether the gate takes a plan of this size."""
        return len(self.ops) <= wire.PLAN_MAX_OPS and len(self.encoded) <= wire.PLAN_MAX_SIZE

    @cached_property
    def hash(self) -> str:
        """The same for the same plan: where an overlay keeps its changes does not count."""
        from stockade.linux.sha256 import sha256

        ops = tuple(op.anywhere() for op in self.ops)
        return sha256(self.backend.encode() + b"\0" + encode(ops, self.base)).hexdigest()

    @cached_property
    def mounts(self) -> dict[str, tuple[int, str]]:
        """What the mount table of the sandbox must show, and nothing beside it."""
        table: dict[str, tuple[int, str]] = {}
        for op in self.ops:
            table.update(op.mounts())
        return table

    @cached_property
    def verified(self) -> dict[bytes, str]:
        """Mount tables that were compared with this plan and found right, with their SHA-256."""
        return {}

    @cached_property
    def verified_maps(self) -> dict[tuple[str, int, bytes], str]:
        """Id maps that were compared with this plan and found right, by kind and the caller's own id."""
        return {}

    @cached_property
    def filter(self) -> str:
        """The SHA-256 of the system call filter, which every plan ends with."""
        from stockade.linux.sha256 import sha256

        last = self.ops[-1]
        assert isinstance(last, Seccomp)
        return sha256(last.program).hexdigest()

    @property
    def observed(self) -> bool:
        """Whether an observer watches the programs."""
        return any(isinstance(op, Observe) for op in self.ops[-2:])

    @cached_property
    def limits(self) -> dict[str, int]:
        """The limits of each process, by resource."""
        return {op.resource: op.value for op in self.ops if isinstance(op, Limit)}

    @cached_property
    def scoped(self) -> bool:
        """Whether Landlock keeps abstract sockets and signals inside."""
        return any(isinstance(op, LandlockRules) and op.scopes for op in self.ops)

    @cached_property
    def rules(self) -> int:
        """How many rules Landlock is given."""
        return sum(isinstance(op, BindGrant | PortGrant) for op in self.ops)

    @cached_property
    def ports(self) -> tuple[int, ...]:
        """The TCP ports that Landlock lets programs connect to; none where it handles no ports."""
        return tuple(op.port for op in self.ops if isinstance(op, PortGrant))

    @cached_property
    def keep(self) -> int:
        """The mask of the capabilities that root inside keeps."""
        return next((op.keep for op in self.ops if isinstance(op, Privileges)), 0)

    @property
    def plain(self) -> bool:
        """Whether it makes no namespaces, and so no mounts either."""
        return not self.namespaces.names

    @property
    def helped(self) -> bool:
        """Whether a helper makes the namespaces and mounts, and loads the filter."""
        return bool(self.namespaces.helper)

    @cached_property
    def overlay(self) -> Overlay | None:
        """The operation that shows the workspace copy-on-write, if there is one."""
        return next((op for op in self.ops if isinstance(op, Overlay)), None)

    @cached_property
    def namespaces(self) -> Namespaces:
        """The operation that every plan begins with."""
        first = self.ops[0]
        assert isinstance(first, Namespaces)
        return first


def encode(ops: tuple[Op, ...], base: int) -> bytes:
    """Return operations as the gate reads them: one flat list of records."""
    records = b"".join([op.record() for op in ops])
    size = wire.PLAN_HEADER.size + len(records)
    return wire.PLAN_HEADER.pack(wire.PLAN_MAGIC.encode(), size, len(ops), base, 0) + records
