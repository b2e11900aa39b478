"""The checks on sockets: which protocols a program may open, and which options it may set or read.

The level and the number of an option are ints for the kernel: the comparisons see their low 32 bits, as it
does. An option that is not open is answered like on a kernel that was built without it.
"""

from __future__ import annotations

from stockade.backends.seccomp.bpf import EQUAL, LOAD, SECOND, THIRD, Line, option_tree
from stockade.policy.socket_options import IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, JOINS, MULTICAST, opened

_TCP_ZEROCOPY_RECEIVE = 35
#: Reading these takes the kernel's lock of all networks.
_READ_UNDER_LOCK = ("IP_MSFILTER", "MCAST_MSFILTER")


def options(allow: tuple[str, ...]) -> list[Line]:
    """Return the check of setsockopt: only the options that are open, or that `allow` names."""
    levels = sorted(opened(allow).items())
    lines: list[Line] = [(LOAD, SECOND, "", "")]
    lines += [(EQUAL, level, f"options of {level}", "") for level, _ in levels[:-1]]
    lines.append((EQUAL, levels[-1][0], f"options of {levels[-1][0]}", "no such option"))
    for level, numbers in levels:
        lines += [f"options of {level}", (LOAD, THIRD, "", ""), *option_tree(level, numbers)]
    return lines


def queries(allow: tuple[str, ...]) -> list[Line]:
    """Return the check of getsockopt: every option but those whose reading is dangerous."""
    closed = {IPPROTO_TCP: [_TCP_ZEROCOPY_RECEIVE]}
    if MULTICAST not in allow:
        for level in (IPPROTO_IP, IPPROTO_IPV6):
            closed[level] = [JOINS[level][name] for name in _READ_UNDER_LOCK if name in JOINS[level]]
    lines: list[Line] = [(LOAD, SECOND, "", "")]
    lines += [(EQUAL, level, f"queries of {level}", "") for level in list(closed)[:-1]]
    lines.append((EQUAL, list(closed)[-1], f"queries of {list(closed)[-1]}", "option allowed"))
    for level, numbers in closed.items():
        lines += [f"queries of {level}", (LOAD, THIRD, "", "")]
        lines += [(EQUAL, number, "no such option", "") for number in numbers[:-1]]
        lines.append((EQUAL, numbers[-1], "no such option", "option allowed"))
    return lines


def bounds(allow: tuple[str, ...] = ()) -> dict[str, list[Line]]:
    """Return the checks on options by their names, for a policy that opens those in `allow`."""
    return {"socket options": options(allow), "socket queries": queries(allow)}
