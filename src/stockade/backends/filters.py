"""The system call filter as a BPF program: a search tree over the numbers.

The kernel tries a filter for every call when it is loaded, and translates
every instruction; both are paid at each start of a sandbox. Neighbouring
calls mostly share their answer, so a tree over intervals takes about a
hundred instructions where one leaf per call takes five hundred.

Arguments are compared by their low 32 bits, which is all that the kernel
looks at for the calls below: a comparison of 64 bits could be slipped past
with a bit set in the high half (CVE-2019-7303).
"""

from __future__ import annotations

import errno
import struct

#: AUDIT_ARCH_… by what uname calls the machine.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag that clone takes
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
PERSONALITY_LINUX, PERSONALITY_QUERY = 0, 0xFFFFFFFF
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
TERMINAL_REQUESTS, SOCKET_REQUESTS = (0x5400, 0x5500), (0x8900, 0x8A00)
#: BTRFS_IOC_SNAP_CREATE, BTRFS_IOC_SUBVOL_CREATE, and the second versions of both.
SUBVOLUMES = (0x50009401, 0x5000940E, 0x50009417, 0x50009418)
#: TCGETS2, TCSETS2 and its two relatives, TIOCGPTN, TIOCSPTLCK; FIGETBSZ, FICLONE, FICLONERANGE, FIEMAP
OTHER_REQUESTS = (
    0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D, 0x80045430, 0x40045431,
    2, 0x40049409, 0x4020940D, 0xC020660B,
)  # fmt: skip
SOCK_STREAM, SOCK_SEQPACKET, SOCK_FLAGS = 1, 5, (0x800, 0x80000)  # SOCK_NONBLOCK, SOCK_CLOEXEC
X32 = 0x40000000
MFD_NOEXEC_SEAL = 8
SELF, GATE, PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1, 0, 1
F_SETLEASE, F_NOTIFY = 1024, 1026
IDLE = 4  # a bit of SCHED_IDLE and not of SCHED_OTHER, SCHED_FIFO, SCHED_RR and SCHED_BATCH

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K
LOAD, EQUAL, AT_LEAST, ANY_BIT, GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE = 0, 4  # where struct seccomp_data has them
FIRST, SECOND, THIRD = 16, 24, 32
HIGHER = 4  # of the same argument
ERRNO = 0x00050000  # SECCOMP_RET_ERRNO
ENDS = {
    "allow": 0x7FFF0000,
    "refuse": ERRNO | errno.EPERM,
    "absent": ERRNO | errno.ENOSYS,
    "unsupported": ERRNO | errno.EAFNOSUPPORT,
    "not offered": ERRNO | errno.EOPNOTSUPP,
    "not a terminal": ERRNO | errno.ENOTTY,
    "kill": 0x80000000,  # the whole process
}

#: One instruction before its jumps are counted: code, operand, where to if true, where to if false.
#: An empty name is the next instruction; a string alone is a label.
Line = tuple[int, int, str, str] | str

#: What is asked of the arguments of the calls that are allowed within bounds.
BOUNDS: dict[str, list[Line]] = {
    # No program types into a terminal that it shares, nor has the kernel load another line discipline.
    # Before 2024 a snapshot of any writable directory on btrfs showed everything that is beside it.
    "requests": [
        (LOAD, SECOND, "", ""),
        *((EQUAL, request, "refuse", "") for request in SUBVOLUMES),
        (EQUAL, TIOCSETD, "refuse", ""),
        (EQUAL, TIOCSTI, "refuse", ""),
        (EQUAL, TIOCLINUX, "refuse", "allow"),
    ],
    "namespaces": [
        (LOAD, FIRST, "", ""),
        (ANY_BIT, NEW_NAMESPACES, "refuse", "allow"),
    ],
    "families": [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_UNIX, "allow", ""),
        (EQUAL, AF_INET, "allow", ""),
        (EQUAL, AF_INET6, "allow", ""),
        (EQUAL, AF_NETLINK, "", "unsupported"),
        (LOAD, THIRD, "", ""),
        (EQUAL, NETLINK_ROUTE, "allow", "unsupported"),
    ],
    # Other families would load their modules into the kernel, and some would give working sockets.
    "pairs": [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_UNIX, "allow", "unsupported"),
    ],
    "personas": [
        (LOAD, FIRST, "", ""),
        (EQUAL, PERSONALITY_LINUX, "allow", ""),
        (EQUAL, PERSONALITY_QUERY, "allow", "refuse"),
    ],
    # The gate has the same user as the program. Its limits and its share of the processor are those
    # of every later command, so one command must not change them for the next.
    "not the gate": [
        (LOAD, FIRST, "", ""),
        (EQUAL, GATE, "refuse", "allow"),
    ],
    # A lease on a file of the host would hold up whoever opens or executes it there, 45 seconds each time.
    "no leases": [
        (LOAD, SECOND, "", ""),
        (EQUAL, F_SETLEASE, "refuse", ""),
        (EQUAL, F_NOTIFY, "refuse", "allow"),
    ],
    # What is in a memory file belongs to no mount: only the file's own seal keeps it from being executed.
    "sealed memory": [
        (LOAD, SECOND, "", ""),
        (ANY_BIT, MFD_NOEXEC_SEAL, "allow", "refuse"),
    ],
    # Whoever attends to a command has the same user too, and a number that is not known here. At the lowest
    # priority, beside many busy programs, it would notice much too late that the command's time is over.
    "itself": [
        (LOAD, FIRST, "", ""),
        (EQUAL, SELF, "allow", "refuse"),
    ],
    "not idle": [
        (LOAD, FIRST, "", ""),
        (EQUAL, SELF, "allow", ""),
        (EQUAL, GATE, "refuse", ""),
        (LOAD, SECOND, "", ""),
        (ANY_BIT, IDLE, "refuse", "allow"),
    ],
    "priorities": [
        (LOAD, FIRST, "", ""),
        (EQUAL, PRIO_PROCESS, "", "refuse"),
        (LOAD, SECOND, "", ""),
        (EQUAL, SELF, "allow", "refuse"),
    ],
    "io priorities": [
        (LOAD, FIRST, "", ""),
        (EQUAL, IOPRIO_WHO_PROCESS, "", "refuse"),
        (LOAD, SECOND, "", ""),
        (EQUAL, GATE, "refuse", "allow"),
    ],
}


def _pairs_of_streams() -> list[Line]:
    """The address that a datagram is sent to is in memory, where no filter can look: streams have none."""
    kinds = [
        kind | flags for kind in (SOCK_STREAM, SOCK_SEQPACKET) for flags in (0, *SOCK_FLAGS, sum(SOCK_FLAGS))
    ]
    return [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_UNIX, "", "unsupported"),
        (LOAD, SECOND, "", ""),
        *((EQUAL, kind, "allow", "") for kind in kinds[:-1]),
        (EQUAL, kinds[-1], "allow", "refuse"),
    ]


_REQUESTS: list[Line] = [
    (LOAD, SECOND, "", ""),
    (EQUAL, TIOCSETD, "refuse", ""),
    (EQUAL, TIOCSTI, "refuse", ""),
    (EQUAL, TIOCLINUX, "refuse", ""),
    *((EQUAL, request, "allow", "") for request in OTHER_REQUESTS),
    (AT_LEAST, TERMINAL_REQUESTS[0], "", "not a terminal"),
]

#: And what is asked where no namespace stands between the program and the host.
BOUNDS_ALONE: dict[str, list[Line]] = {
    # No attribute of a file is changed through a descriptor that can only read it.
    "few requests": [
        *_REQUESTS,
        (AT_LEAST, TERMINAL_REQUESTS[1], "", "allow"),
        (AT_LEAST, SOCKET_REQUESTS[0], "", "not a terminal"),
        (AT_LEAST, SOCKET_REQUESTS[1], "not a terminal", "allow"),
    ],
    # Any socket, also one of a pair, would tell the addresses of the host.
    "no requests to sockets": [
        *_REQUESTS,
        (AT_LEAST, TERMINAL_REQUESTS[1], "not a terminal", "allow"),
    ],
    # A named socket of the host could be reached by a path that Landlock does not look at.
    "no unix names": [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_INET, "allow", ""),
        (EQUAL, AF_INET6, "allow", ""),
        (EQUAL, AF_NETLINK, "", "unsupported"),
        (LOAD, THIRD, "", ""),
        (EQUAL, NETLINK_ROUTE, "allow", "unsupported"),
    ],
    "pairs of streams": _pairs_of_streams(),
    # To set the time of an open file to now, as `touch` does; no path, no time.
    "now": [
        (LOAD, SECOND, "", ""),
        (EQUAL, 0, "", "refuse"),
        (LOAD, SECOND + HIGHER, "", ""),
        (EQUAL, 0, "", "refuse"),
        (LOAD, THIRD, "", ""),
        (EQUAL, 0, "", "refuse"),
        (LOAD, THIRD + HIGHER, "", ""),
        (EQUAL, 0, "allow", "refuse"),
    ],
    "own io priority": [
        (LOAD, FIRST, "", ""),
        (EQUAL, IOPRIO_WHO_PROCESS, "", "refuse"),
        (LOAD, SECOND, "", ""),
        (EQUAL, SELF, "allow", "refuse"),
    ],
}

#: The calls that are allowed within bounds, and which.
BOUNDED = {
    "ioctl": "requests",
    "fcntl": "no leases",
    "clone": "namespaces",
    "socket": "families",
    "socketpair": "pairs",
    "personality": "personas",
    "prlimit64": "not the gate",
    "sched_setaffinity": "not the gate",
    "sched_setattr": "itself",
    "sched_setparam": "not the gate",
    "sched_setscheduler": "not idle",
    "setpriority": "priorities",
    "ioprio_set": "io priorities",
}

#: Where there are no namespaces, every process of the user could be meant.
BOUNDED_ALONE = {
    "ioctl": "few requests",
    "socketpair": "pairs of streams",
    "utimensat": "now",
    "prlimit64": "itself",
    "sched_setaffinity": "itself",
    "sched_setattr": "itself",
    "sched_setparam": "itself",
    "sched_setscheduler": "itself",
    "ioprio_set": "own io priority",
}

#: What is bounded besides, where the policy says which files may be executed.
BOUNDED_BY_EXEC = {"memfd_create": "sealed memory"}


def program(machine: str, answers: dict[int, str]) -> bytes:
    """The filter: for each number the name of an end or of bounds; the rest is absent."""
    lines: list[Line] = [
        (LOAD, ARCHITECTURE, "", ""),
        (EQUAL, ARCHITECTURES[machine], "", "kill"),
        (LOAD, NUMBER, "", ""),
        (AT_LEAST, X32, "kill", ""),
        *_tree(_intervals(answers)),
    ]
    used = set(answers.values())
    for name, bounds in (BOUNDS | BOUNDS_ALONE).items():
        lines += [name, *bounds] if name in used else []
    led_to = {target for line in lines if not isinstance(line, str) for target in line[2:]}
    for name, value in ENDS.items():
        lines += [name, (GIVE, value, "", "")] if name in led_to else []
    return _assemble(lines)


def _intervals(answers: dict[int, str]) -> list[tuple[int, str]]:
    """The first number of each run of equal answers."""
    found: list[tuple[int, str]] = []
    for number in range(max(answers) + 2):
        answer = answers.get(number, "absent")
        if not found or found[-1][1] != answer:
            found.append((number, answer))
    return found


def _tree(intervals: list[tuple[int, str]]) -> list[Line]:
    """A search for the interval that a number is in, which goes on at its answer."""
    if len(intervals) == 1:
        return []
    middle = len(intervals) // 2
    first, answer = intervals[middle]
    left, right = _tree(intervals[:middle]), _tree(intervals[middle:])
    at = f"from {first}"
    return [
        (AT_LEAST, first, at if right else answer, "" if left else intervals[0][1]),
        *left,
        *((at, *right) if right else ()),
    ]


def _assemble(lines: list[Line]) -> bytes:
    places: dict[str, int] = {}
    count = 0
    for line in lines:
        if isinstance(line, str):
            places[line] = count
        else:
            count += 1
    instructions = [line for line in lines if not isinstance(line, str)]
    found = []
    for here, (code, operand, if_true, if_false) in enumerate(instructions):
        jumps = [places[name] - here - 1 if name else 0 for name in (if_true, if_false)]
        # A jump has eight bits and goes forward only; struct refuses what does not fit.
        found.append(struct.pack("=HBBI", code, *jumps, operand))
    return b"".join(found)
