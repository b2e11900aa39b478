"""The bars: the required values, in one table that the command and the tests read."""

from __future__ import annotations

from typing import Literal

import msgspec

MIB = 1 << 20


class Bar(msgspec.Struct, frozen=True):
    """The worst acceptable value of a measure."""

    at: float
    about: str
    better: Literal["lower", "higher"] = "lower"
    unit: Literal["×", "/s", "ms", "µs", "bytes", "walls", "connections"] = "×"
    #: An aim: shown, but missing it is no failure.
    aim: bool = False
    #: The value does not vary from run to run, so it gets no slack.
    exact: bool = False

    def holds(self, value: float, slack: float = 1.0) -> bool:
        """Whether the value is good enough; `slack` 1.3 allows 30 % for a busy machine."""
        slack = 1.0 if self.exact else slack
        return value <= self.at * slack if self.better == "lower" else value >= self.at / slack


BARS = {
    "cold/bwrap": Bar(0.42, "time to run /bin/true, by bwrap's with the same mounts"),
    "cold/bwrap with five mounts": Bar(
        0.7, "time to run /bin/true, by that of a bwrap with five mounts and no filter"
    ),
    "cold/sandlock": Bar(0.72, "time to run /bin/true, by sandlock's"),
    "cold/posix_spawn": Bar(3.0, "time to run /bin/true, by that of a bare posix_spawn", aim=True),
    "cold/p99": Bar(0.6, "99th percentile of the time to run /bin/true, by that of bwrap's", aim=True),
    "rate/bwrap": Bar(1.8, "sandboxes per second with two workers, by bwrap's", "higher"),
    "rate/sandlock": Bar(1.15, "sandboxes per second with two workers, by sandlock's", "higher", aim=True),
    "inside/git": Bar(1.08, "git init, five commits and a clone, by the same outside"),
    "inside/compile": Bar(1.08, "three gcc compiles and a link, by the same outside"),
    "inside/search": Bar(1.08, "find and grep over two thousand headers, by the same outside"),
    "inside/imports": Bar(1.08, "imports of Python's standard library, by the same outside"),
    "memory/sandbox": Bar(MIB, "memory of one idle sandbox: its gate, its supervisor's growth", unit="bytes"),
    "memory/gate": Bar(MIB, "size of the gate's executable", unit="bytes", exact=True),
    "heap/1GB": Bar(1.3, "time to run /bin/true from a process of 1 GB, by that from a small one"),
    "growth/start": Bar(
        1.3, "time to run /bin/true beside a thousand living sandboxes, by that beside ten", aim=True
    ),
    "workspace/open": Bar(1.2, "time to run /bin/true in an overlay of very many files, by an empty one's"),
    "workspace/untar": Bar(1.05, "untar of 3,000 files in our overlay, by that in a bare one of the kernel"),
    "workspace/install": Bar(1.05, "nested small files made in our overlay, by those in a bare one"),
    "workspace/checkout": Bar(1.05, "git commits and checkouts in our overlay, by those in a bare one"),
    "workspace/untar by bwrap": Bar(1.0, "the same untar, by that in bwrap's --overlay"),
    "workspace/install by bwrap": Bar(1.0, "the same small files, by those in bwrap's --overlay"),
    "workspace/checkout by bwrap": Bar(1.0, "the same commits and checkouts, by those in bwrap's --overlay"),
    "receipt/made": Bar(0.6, "time to make, sign and log a receipt, by that of a bare posix_spawn", aim=True),
    "receipt/verified": Bar(0.25, "time to verify a receipt, by that of a bare posix_spawn", aim=True),
    "receipt/long": Bar(1.5, "time to append to a log of a million receipts, by that to an empty one"),
    "warm/print": Bar(0.5, "time of print(1) in a fresh warm sandbox, by that of a bare python -c pass"),
    "warm/numpy": Bar(0.1, "time to use numpy in a fresh warm sandbox, by that of a bare import of it"),
    "warm/rate": Bar(250, "fresh warm sandboxes per second with two workers", "higher", "/s", aim=True),
    "warm/run": Bar(
        1.75, "time of /bin/true in a sandbox that lives, by that of a bare posix_spawn", aim=True
    ),
    "shell/run": Bar(1.0, "time of `true` in a shell of a sandbox that lives", unit="ms", aim=True),
    "shell/memory": Bar(
        1.5e6,
        "memory of a sandbox with a shell: its gates, bash, its supervisor's growth",
        unit="bytes",
        aim=True,
    ),
    "egress/start": Bar(
        1.0, "time that network rules add to a run of /bin/true, by that of a bare python -c pass"
    ),
    "egress/added start": Bar(10, "the same as a time", unit="ms", aim=True),
    "egress/cold": Bar(
        1.5, "time that a network rule adds to `stockade run -- true`, by that of one without rules"
    ),
    "egress/added cold": Bar(100, "the same as a time", unit="ms", aim=True),
    "egress/connect": Bar(
        1.0, "time that the egress adds to a connection and one byte there and back, by a bare posix_spawn"
    ),
    "egress/added connect": Bar(1.0, "the same as a time", unit="ms", aim=True),
    "egress/download": Bar(0.5, "bytes per second to the inside, by those of a direct stream", "higher"),
    "egress/upload": Bar(0.5, "bytes per second from the inside, by those of a direct stream", "higher"),
    "egress/held": Bar(
        1000, "connections of one sandbox that are open at once", "higher", "connections", exact=True
    ),
    "egress/memory": Bar(
        6e6, "memory of a sandbox with network rules beyond that of one without", unit="bytes", aim=True
    ),
    "judged/throughput": Bar(
        2.0, "requests per second for 100 KB that rules judge, by those of mitmproxy", "higher"
    ),
    "judged/added first": Bar(
        3.0, "time that rules for requests add to a connection and its first request", unit="ms", aim=True
    ),
    "judged/added later": Bar(1.0, "the same for later requests", unit="ms", aim=True),
    "judged/authority": Bar(
        5.0, "time to make a certificate authority and its first certificate", unit="ms", aim=True
    ),
    "observe/open": Bar(
        6.0, "time that an observer adds to opening a file, by that of a byte to another process and back"
    ),
    "observe/added open": Bar(12, "the same as a time", unit="µs", aim=True),
    "observe/refusal": Bar(2.5, "the same for a file that a wall refuses, which the observer writes down"),
    "observe/added refusal": Bar(12, "the same as a time", unit="µs", aim=True),
    "server/session": Bar(
        1.5, "time to make an isolated session over HTTP, by that of a bare python -c pass"
    ),
    "server/session time": Bar(15, "the same as a time", unit="ms", aim=True),
    "server/run": Bar(5.0, "time of `echo` in an isolated session over HTTP, by that of a bare posix_spawn"),
    "server/run time": Bar(3.0, "the same as a time", unit="ms", aim=True),
    "server/command": Bar(
        10.0, "time of `echo` as a command in a sandbox over HTTP, by that of a bare posix_spawn"
    ),
    "server/sandbox": Bar(4.0, "time to make a sandbox over HTTP, by that of a bare python -c pass"),
    "server/sandbox time": Bar(40, "the same as a time", unit="ms", aim=True),
    "server/session beside many": Bar(1.3, "time to make a session while many live, by that while none does"),
    "server/run beside many": Bar(1.3, "time of `echo` while many sessions live, by that while none does"),
    "server/sandbox beside many": Bar(
        1.3, "time to make a sandbox while many sessions live, by that while none does"
    ),
    "server/cycles": Bar(
        1.2, "time of the last sessions of many that are made and ended, by that of the first"
    ),
    "server/cycles memory": Bar(
        20_000, "growth of the server and its supervisors by a session that was made and ended", unit="bytes"
    ),
    "pipeline/data": Bar(
        0.9, "bytes per second through three stages, by those through the same shell pipeline", "higher"
    ),
    "pipeline/start": Bar(
        1.5, "time of `stockade pipe` with three stages of true, by `stockade run -- true`"
    ),
    "pipeline/warm start": Bar(
        1.5, "time of three stages of /bin/true in a warm process, by that of one", aim=True
    ),
    "pipeline/data by sandlock": Bar(
        1.0, "bytes per second through three stages, by those through sandlock's pipeline", "higher", aim=True
    ),
    "pipeline/start by sandlock": Bar(
        1.0, "time of three stages of /bin/true in a warm process, by sandlock's", aim=True
    ),
    "start/import": Bar(2.0, "time to import stockade in a new interpreter, by that of an empty one"),
    "start/run": Bar(4.0, "time of `stockade run -- true`, by that of an empty interpreter", aim=True),
    "walls/open": Bar(0, "attacks of the probe that get through", unit="walls", exact=True),
}
