"""The walls of an egress process: a plan like any sandbox's, with the host's network and none of its files.

An egress process needs no file and no program, so its root holds neither: only one empty file, by which the
gate tries whether Landlock refuses it. What it may reach of the network, Landlock bounds by port.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from stockade.backends.plan_parts import READ_DIR, READ_FILE, SCOPES, SCOPES_ABI, handled_rights
from stockade.gate import operations as ops

HOSTNAME = "stockade-egress"
#: The version of Landlock that has rules for TCP ports.
PORTS_ABI = 4
#: The private file system holds one empty file.
ROOT_BYTES, ROOT_FILES = 1 << 16, 16
#: The gate and the process.
TASKS = 2
#: Bytes of private memory, and of any file: the records are kept in one of memory.
MEMORY, FILE_SIZE = 512 << 20, 64 << 20
CANARY = "/refused"


#: Where a host keeps what the lookup of a name reads: configuration, libraries, and lists of servers.
RESOLVER_TREES = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc",
    "/nix/store",
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager",
    "/run/connman",
)
RESOLVER_FILES, RESOLVER_MEMORY = 4096, 512 << 20


class EgressInputs(msgspec.Struct, frozen=True):
    """Everything that the plan depends on."""

    root: bool
    landlock: int
    #: The TCP ports that it may connect to.
    ports: tuple[int, ...]
    files: int
    program: bytes


@lru_cache(maxsize=64)
def compile_egress_plan(given: EgressInputs) -> ops.Plan:
    """Return the operations that raise the walls of an egress process."""
    by_port = given.landlock >= PORTS_ABI
    return ops.Plan(
        "egress",
        0,
        (
            ops.Namespaces(
                names=tuple(name for name in ops.NAMESPACES if name != "net"), every_id=given.root
            ),
            ops.Hostname(name=HOSTNAME),
            ops.Root(size=ROOT_BYTES, inodes=ROOT_FILES),
            ops.File(path=CANARY, content=b""),
            ops.Pivot(),
            ops.Keyring(),
            ops.Limit(resource="core", value=0),
            ops.Limit(resource="files", value=given.files),
            ops.Limit(resource="tasks", value=TASKS),
            ops.Limit(resource="data", value=MEMORY),
            ops.Limit(resource="file_size", value=FILE_SIZE),
            ops.Privileges(),
            ops.LandlockRules(
                files=handled_rights(given.landlock),
                network=ops.BIND_TCP | ops.CONNECT_TCP if by_port else 0,
                scopes=SCOPES if given.landlock >= SCOPES_ABI else 0,
            ),
            ops.BindGrant(path="/", rights=READ_DIR, words="list directories"),
            *(ops.PortGrant(port=port, clause="net") for port in given.ports if by_port),
            ops.Seccomp(program=given.program),
        ),
    )


def compile_resolver_plan(landlock: int, trees: tuple[str, ...], files: int, program: bytes) -> ops.Plan:
    """Return the operations by which the resolver confines itself to reading the given trees."""
    return ops.Plan(
        "resolver",
        0,
        (
            ops.Namespaces(names=(), every_id=False),
            ops.Limit(resource="core", value=0),
            ops.Limit(resource="files", value=files),
            ops.Limit(resource="data", value=RESOLVER_MEMORY),
            ops.Limit(resource="file_size", value=0),
            ops.Privileges(),
            ops.LandlockRules(files=handled_rights(landlock), scopes=SCOPES if landlock >= SCOPES_ABI else 0),
            *(ops.BindGrant(path=tree, rights=READ_FILE | READ_DIR, words="read") for tree in trees),
            ops.Seccomp(program=program),
        ),
    )
