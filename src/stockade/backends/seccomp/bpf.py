"""The system call filter as a BPF program: a search tree over the numbers.

When a filter is loaded, the kernel tries it for every call and translates every instruction; each start of a
sandbox pays for both. Neighbouring calls mostly share their answer, so a tree over intervals takes about a
hundred instructions where one leaf per call takes five hundred.

Arguments are compared by their low 32 bits, which is all that the kernel reads for the calls below: a program
could evade a comparison of 64 bits with a bit set in the high half (CVE-2019-7303).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection

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
#: Requests of bridges, of drivers from SIOCETHTOOL to SIOCWANDEV, and from SIOCADDDLCI (VLANs, bonds) on.
DEVICE_REQUESTS = ((0x8940, 0x8942), (0x8946, 0x894B), (0x8980, 0x8A00))
SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET = 1, 2, 5
SOCK_FLAGS = (0x800, 0x80000)  # SOCK_NONBLOCK, SOCK_CLOEXEC
X32 = 0x40000000
MFD_HUGETLB, MFD_NOEXEC_SEAL = 4, 8
MAP_HUGETLB, SHM_HUGETLB = 0x40000, 0o4000
PR_SET_SECCOMP, PR_SCHED_CORE = 22, 62
SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
#: A bit of SOCK_RDM, SOCK_SEQPACKET, SOCK_DCCP and SOCK_PACKET, and of no other kind of socket.
OTHER_KINDS = 0xC
#: IPPROTO_IP (the kind's own), IPPROTO_ICMP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMPV6, IPPROTO_MPTCP.
PROTOCOLS = (0, 1, 6, 17, 58, 262)
SELF, GATE, PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1, 0, 1
F_SETLEASE, F_NOTIFY = 1024, 1026
F_SET_RW_HINT, F_SET_FILE_RW_HINT = 1036, 1038
IDLE = 4  # a bit of SCHED_IDLE and not of SCHED_OTHER, SCHED_FIFO, SCHED_RR and SCHED_BATCH

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K, BPF_JMP|JA
LOAD, EQUAL, AT_LEAST, ANY_BIT, GIVE, JUMP = 0x20, 0x15, 0x35, 0x45, 0x06, 0x05
FARTHEST = 255  # that a condition can jump
NUMBER, ARCHITECTURE = 0, 4  # where struct seccomp_data has them
FIRST, SECOND, THIRD, FOURTH, SIXTH = 16, 24, 32, 40, 56
HIGHER = 4  # of the same argument
ERRNO = 0x00050000  # SECCOMP_RET_ERRNO
NOTIFY = 0x7FC00000  # SECCOMP_RET_USER_NOTIF
#: What the gate passes as the sixth argument of its own calls: UNOBSERVED of `gate/src/kernel.h`.
UNOBSERVED = 0x53544B47
ENDS = {
    "allow": 0x7FFF0000,
    "refuse": ERRNO | errno.EPERM,
    "no file": ERRNO | errno.EACCES,
    "absent": ERRNO | errno.ENOSYS,
    "unknown": ERRNO | errno.EINVAL,
    "no such protocol": ERRNO | errno.EPROTONOSUPPORT,
    "out of memory": ERRNO | errno.ENOMEM,
    "unsupported": ERRNO | errno.EAFNOSUPPORT,
    "not offered": ERRNO | errno.EOPNOTSUPP,
    "not a terminal": ERRNO | errno.ENOTTY,
    "kill": 0x80000000,  # the whole process
}

#: Where the last bounds lead, after all others: no condition could jump over these to the ends above.
LAST_ENDS = {"option allowed": ENDS["allow"], "no such option": ERRNO | errno.ENOPROTOOPT}

#: One instruction before its jumps are counted: code, operand, target if true, target if false.
#: An empty name is the next instruction; a string alone is a label.
Line = tuple[int, int, str, str] | str


def _internet_sockets() -> list[Line]:
    """Allow TCP, UDP, ICMP and NETLINK_ROUTE; the family is loaded.

    The kernel would load the modules of other protocols (SCTP, L2TP, SMC), which no ordinary program needs.
    """
    return [
        (EQUAL, AF_INET, "kinds", ""),
        (EQUAL, AF_INET6, "kinds", ""),
        (EQUAL, AF_NETLINK, "", "unsupported"),
        (LOAD, THIRD, "", ""),
        (EQUAL, NETLINK_ROUTE, "allow", "unsupported"),
        "kinds",
        (LOAD, SECOND, "", ""),
        (ANY_BIT, OTHER_KINDS, "no such protocol", ""),
        (LOAD, THIRD, "", ""),
        *((EQUAL, protocol, "allow", "") for protocol in PROTOCOLS[:-1]),
        (EQUAL, PROTOCOLS[-1], "allow", "no such protocol"),
    ]


def _device_requests() -> list[Line]:
    """Refuse what is for the administrator of a network; the request is loaded.

    Some take the kernel's lock of all networks (SIOCETHTOOL), others load modules (SIOCGIFBR, SIOCGIFVLAN).
    """
    lines: list[Line] = []
    for first, after in DEVICE_REQUESTS:
        lines += [(AT_LEAST, first, "", "allow"), (AT_LEAST, after, "", "not offered")]
    return [*lines[:-1], (AT_LEAST, DEVICE_REQUESTS[-1][1], "allow", "not offered")]


#: The checks on the arguments of calls that are allowed within bounds.
BOUNDS: dict[str, list[Line]] = {
    # No program may type into a terminal that it shares, or make the kernel load another line discipline.
    # Before 2024 a snapshot of any writable directory on btrfs showed everything beside it.
    "requests": [
        (LOAD, SECOND, "", ""),
        *((EQUAL, request, "refuse", "") for request in SUBVOLUMES),
        (EQUAL, TIOCSETD, "refuse", ""),
        (EQUAL, TIOCSTI, "refuse", ""),
        (EQUAL, TIOCLINUX, "refuse", ""),
        *_device_requests(),
    ],
    "namespaces": [
        (LOAD, FIRST, "", ""),
        (ANY_BIT, NEW_NAMESPACES, "refuse", "allow"),
    ],
    "families": [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_UNIX, "allow", ""),
        *_internet_sockets(),
    ],
    # Other families would make the kernel load their modules, and some would give working sockets.
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
    # A lease on a file of the host would block every process that opens or executes it, 45 seconds each time.
    # A hint on how long its data will live is written to the inode, even through a read-only descriptor.
    # The commands from F_SET_FILE_RW_HINT on are those of newer kernels: delegations, which are leases.
    "file commands": [
        (LOAD, SECOND, "", ""),
        (EQUAL, F_SETLEASE, "refuse", ""),
        (EQUAL, F_NOTIFY, "refuse", ""),
        (EQUAL, F_SET_RW_HINT, "unknown", ""),
        (AT_LEAST, F_SET_FILE_RW_HINT, "unknown", "allow"),
    ],
    # Huge pages are a pool of the whole machine, and no memory cgroup counts them. The answer is that of a
    # machine that has reserved none, as most have not: every program that asks is prepared for it.
    "small pages": [
        (LOAD, FOURTH, "", ""),
        (ANY_BIT, MAP_HUGETLB, "out of memory", "allow"),
    ],
    # For these two the manual names EPERM for a caller that may not have huge pages.
    "small shared pages": [
        (LOAD, THIRD, "", ""),
        (ANY_BIT, SHM_HUGETLB, "refuse", "allow"),
    ],
    "small memory files": [
        (LOAD, SECOND, "", ""),
        (ANY_BIT, MFD_HUGETLB, "refuse", "allow"),
    ],
    # A memory file is on no mount that could be noexec: only its own seal forbids its execution.
    "sealed memory": [
        (LOAD, SECOND, "", ""),
        (ANY_BIT, MFD_HUGETLB, "refuse", ""),
        (ANY_BIT, MFD_NOEXEC_SEAL, "allow", "refuse"),
    ],
    # Every filter, of system calls or of a socket, is translated into memory that bpf_jit_limit bounds for
    # the whole machine: when that is used up, no process without CAP_BPF can load one, and no sandbox starts.
    # The answers are those of a kernel that was built without filters.
    # A core scheduling cookie would keep all other processes off the other threads of a core.
    "no filters": [
        (LOAD, FIRST, "", ""),
        (EQUAL, PR_SET_SECCOMP, "unknown", ""),
        (EQUAL, PR_SCHED_CORE, "unknown", "allow"),
    ],
    "own filters": [
        (LOAD, FIRST, "", ""),
        (EQUAL, PR_SCHED_CORE, "unknown", "allow"),
    ],
    # A filter lives as long as a process holds its listener; without one it ends with its tasks.
    "no listeners": [
        (LOAD, SECOND, "", ""),
        (ANY_BIT, SECCOMP_FILTER_FLAG_NEW_LISTENER, "refuse", "allow"),
    ],
    # A keeper has the same user too, and its PID is not known here. At the lowest priority, beside many busy
    # programs, it would notice much too late that the command's time is over.
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
    """Allow only pairs of streams: a datagram's address is in memory, which a filter cannot read."""
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

#: The checks that are needed without namespaces.
BOUNDS_ALONE: dict[str, list[Line]] = {
    # No program may change an attribute of a file through a read-only descriptor.
    "few requests": [
        *_REQUESTS,
        (AT_LEAST, TERMINAL_REQUESTS[1], "", "allow"),
        (AT_LEAST, SOCKET_REQUESTS[0], "", "not a terminal"),
        (AT_LEAST, SOCKET_REQUESTS[1], "not a terminal", ""),
        *_device_requests(),
    ],
    # Any socket, even one of a pair, would reveal the addresses of the host.
    "no requests to sockets": [
        *_REQUESTS,
        (AT_LEAST, TERMINAL_REQUESTS[1], "not a terminal", "allow"),
    ],
    # A program could reach a named socket of the host by a path that Landlock does not check.
    "no unix names": [(LOAD, FIRST, "", ""), *_internet_sockets()],
    "pairs of streams": _pairs_of_streams(),
    # Only to set the time of an open file to now, as `touch` does: no path, no other time.
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

PROT_EXEC = 4
MSG_FASTOPEN = 0x20000000
IPPROTO_IP, IPPROTO_TCP, IPPROTO_UDP = 0, 6, 17
FIONREAD, FIONBIO = 0x541B, 0x5421
F_DUPFD_CLOEXEC = 1030
AT_EMPTY_PATH = 0x1000
#: F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_SETPIPE_SZ, F_GETPIPE_SZ, F_GET_SEALS
DESCRIPTOR_COMMANDS = (1, 2, 3, 4, 1031, 1032, 1034)


def _tcp_sockets() -> list[Line]:
    """Allow TCP over IPv4 and IPv6 only: Landlock's rules for ports know neither MPTCP nor SCTP."""
    kinds = [SOCK_STREAM | flags for flags in (0, *SOCK_FLAGS, sum(SOCK_FLAGS))]
    return [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_INET, "tcp kinds", ""),
        (EQUAL, AF_INET6, "tcp kinds", "unsupported"),
        "tcp kinds",
        (LOAD, SECOND, "", ""),
        *((EQUAL, kind, "tcp protocols", "") for kind in kinds[:-1]),
        (EQUAL, kinds[-1], "tcp protocols", "unsupported"),
        "tcp protocols",
        (LOAD, THIRD, "", ""),
        (EQUAL, IPPROTO_IP, "allow", ""),
        (EQUAL, IPPROTO_TCP, "allow", "unsupported"),
    ]


def _tcp_and_udp_sockets() -> list[Line]:
    """Allow UDP as well, and no other protocol of datagrams."""
    streams, datagrams = (
        [kind | flags for flags in (0, *SOCK_FLAGS, sum(SOCK_FLAGS))] for kind in (SOCK_STREAM, SOCK_DGRAM)
    )
    return [
        (LOAD, FIRST, "", ""),
        (EQUAL, AF_INET, "socket kinds", ""),
        (EQUAL, AF_INET6, "socket kinds", "unsupported"),
        "socket kinds",
        (LOAD, SECOND, "", ""),
        *((EQUAL, kind, "stream protocols", "") for kind in streams),
        *((EQUAL, kind, "datagram protocols", "") for kind in datagrams[:-1]),
        (EQUAL, datagrams[-1], "datagram protocols", "unsupported"),
        "stream protocols",
        (LOAD, THIRD, "", ""),
        (EQUAL, IPPROTO_IP, "allow", ""),
        (EQUAL, IPPROTO_TCP, "allow", "unsupported"),
        "datagram protocols",
        (LOAD, THIRD, "", ""),
        (EQUAL, IPPROTO_IP, "allow", ""),
        (EQUAL, IPPROTO_UDP, "allow", "unsupported"),
    ]


#: The checks on the calls of a process that relays connections.
BOUNDS_RELAY: dict[str, list[Line]] = {
    "tcp sockets": _tcp_sockets(),
    "tcp and udp sockets": _tcp_and_udp_sockets(),
    # A message with this flag connects as well, past the call that Landlock checks.
    "messages": [
        (LOAD, THIRD, "", ""),
        (ANY_BIT, MSG_FASTOPEN, "refuse", "allow"),
    ],
    "datagrams": [
        (LOAD, FOURTH, "", ""),
        (ANY_BIT, MSG_FASTOPEN, "refuse", "allow"),
    ],
    "no code": [
        (LOAD, THIRD, "", ""),
        (ANY_BIT, PROT_EXEC, "refuse", "allow"),
    ],
    "no code in small pages": [
        (LOAD, THIRD, "", ""),
        (ANY_BIT, PROT_EXEC, "refuse", ""),
        (LOAD, FOURTH, "", ""),
        (ANY_BIT, MAP_HUGETLB, "out of memory", "allow"),
    ],
    "sizes of queues": [
        (LOAD, SECOND, "", ""),
        (EQUAL, FIONBIO, "allow", ""),
        (EQUAL, FIONREAD, "allow", "not a terminal"),
    ],
    # The C library asks so for the size of an open file. The path is in memory, where no filter can look.
    "open files": [
        (LOAD, FOURTH, "", ""),
        (ANY_BIT, AT_EMPTY_PATH, "allow", "no file"),
    ],
    "own descriptors": [
        (LOAD, SECOND, "", ""),
        *((EQUAL, command, "allow", "") for command in DESCRIPTOR_COMMANDS),
        (EQUAL, F_DUPFD_CLOEXEC, "allow", "unknown"),
    ],
}

#: The calls that are allowed within bounds, and the name of the bounds.
BOUNDED = {
    "ioctl": "requests",
    "fcntl": "file commands",
    "mmap": "small pages",
    "shmget": "small shared pages",
    "memfd_create": "small memory files",
    "prctl": "no filters",
    "setsockopt": "socket options",
    "getsockopt": "socket queries",
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

#: The same without namespaces, where an argument can name any process of the user.
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

#: Other bounds if the policy allows a call by name that is absent by default.
BOUNDED_WITH = {"seccomp": {"seccomp": "no listeners", "prctl": "own filters"}}

#: Further bounds if the policy says which files may be executed.
BOUNDED_BY_EXEC = {"memfd_create": "sealed memory"}


def program(machine: str, answers: dict[int, str], last: dict[str, list[Line]]) -> bytes:
    """Assemble the filter; `answers` maps numbers to names of `ENDS` or bounds, all others are absent.

    `last` are bounds that lead to `LAST_ENDS`.
    """
    lines: list[Line] = [
        (LOAD, ARCHITECTURE, "", ""),
        (EQUAL, ARCHITECTURES[machine], "", "kill"),
        (LOAD, NUMBER, "", ""),
        (AT_LEAST, X32, "kill", ""),
        *_tree(_intervals(answers)),
    ]
    used = set(answers.values())
    for name, bounds in (BOUNDS | BOUNDS_ALONE | BOUNDS_RELAY).items():
        lines += [name, *bounds] if name in used else []
    after = [line for name in last if name in used for line in (name, *last[name])]
    led_to = {target for line in lines if not isinstance(line, str) for target in line[2:]}
    for name, value in ENDS.items():
        lines += [name, (GIVE, value, "", "")] if name in led_to else []
    ends = [line for name, value in LAST_ENDS.items() for line in (name, (GIVE, value, "", ""))]
    return _assemble([*lines, *after, *ends] if after else lines)


def notify_of(calls: dict[int, str]) -> bytes:
    """Assemble what an observed filter does with an allowed call: those in `calls` notify the observer.

    "notify" spares the gate's own calls, "always" spares none. "always unless thrice marked" spares those
    whose mark nobody leaves in three arguments by chance.
    """
    lines: list[Line] = [
        (LOAD, NUMBER, "", ""),
        *_tree(_intervals(calls, "allow")),
        "always unless thrice marked",
        (LOAD, THIRD, "", ""),
        (EQUAL, UNOBSERVED, "", "always"),
        (LOAD, FOURTH, "", ""),
        (EQUAL, UNOBSERVED, "", "always"),
        "notify",
        (LOAD, SIXTH, "", ""),
        (EQUAL, UNOBSERVED, "allow", ""),
        "always",
        (GIVE, NOTIFY, "", ""),
        "allow",
        (GIVE, ENDS["allow"], "", ""),
    ]
    return _assemble(lines)


def _intervals(answers: dict[int, str], otherwise: str = "absent") -> list[tuple[int, str]]:
    """Return the first number of each run of equal answers, and the answer."""
    found: list[tuple[int, str]] = []
    for number in range(max(answers) + 2):
        answer = answers.get(number, otherwise)
        if not found or found[-1][1] != answer:
            found.append((number, answer))
    return found


def option_tree(level: int, numbers: Collection[int]) -> list[Line]:
    """Return a search that allows the options of a level with these numbers."""
    return _tree(_intervals(dict.fromkeys(numbers, "option allowed"), "no such option"), f"{level} from")


def _tree(intervals: list[tuple[int, str]], label: str = "from") -> list[Line]:
    """Return a binary search for the interval of a number, which jumps to its answer."""
    if len(intervals) == 1:
        return []
    middle = len(intervals) // 2
    first, answer = intervals[middle]
    left, right = _tree(intervals[:middle], label), _tree(intervals[middle:], label)
    at = f"{label} {first}"
    return [
        (AT_LEAST, first, at if right else answer, "" if left else intervals[0][1]),
        *left,
        *((at, *right) if right else ()),
    ]


def _assemble(lines: list[Line]) -> bytes:
    lines = _within_reach(lines)
    places = _places(lines)
    instructions = [line for line in lines if not isinstance(line, str)]
    found = []
    for here, (code, operand, if_true, if_false) in enumerate(instructions):
        jumps = [places[name] - here - 1 if name else 0 for name in (if_true, if_false)]
        if code == JUMP:
            found.append(struct.pack("=HBBI", code, 0, 0, jumps[0]))
        else:
            # Jumps only go forward; struct refuses one that does not fit.
            found.append(struct.pack("=HBBI", code, *jumps, operand))
    return b"".join(found)


def _places(lines: list[Line]) -> dict[str, int]:
    """Return the number of the instruction after each label."""
    places: dict[str, int] = {}
    count = 0
    for line in lines:
        if isinstance(line, str):
            places[line] = count
        else:
            count += 1
    return places


def _within_reach(lines: list[Line]) -> list[Line]:
    """Add jumps where names in a policy make the filter too long for the eight bits of a condition."""
    while True:
        places = _places(lines)
        found: list[Line] = []
        here = 0
        for line in lines:
            here += not isinstance(line, str)
            far = [
                name
                for name in (() if isinstance(line, str) or line[0] == JUMP else line[2:])
                if name and places[name] - here > FARTHEST
            ]
            if isinstance(line, str) or not far:
                found.append(line)
                continue
            after = f"after {here} of {len(lines)}"
            hops = {name: f"{after} to {name}" for name in far}
            code, operand, *targets = line
            if_true, if_false = (hops.get(name, name or after) for name in targets)
            found.append((code, operand, if_true, if_false))
            for name, hop in hops.items():
                found += [hop, (JUMP, 0, name, "")]
            found.append(after)
        if len(found) == len(lines):
            return lines
        lines = found
