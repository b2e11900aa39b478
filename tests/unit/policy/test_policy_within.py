"""One policy within another: by effect, reflexive, transitive, and said in words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade import backends
from stockade.controls import Control
from stockade.policy import Policy
from stockade.policy.compare import NOTHING, RULES, PathAccess, clauses, excess
from stockade.policy.model import BACKENDS, PROFILES
from stockade.policy.model import WEAKER as WEAKER_BACKENDS
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import parse_rule

#: What a policy accepts that may run without namespaces.
ACCEPTED = ["files", "processes", "devices", "protect"]
PATHS = st.sampled_from(
    ["/a", "/a/b", "/a/b/c", "/a/d?", "/a/d", "/a/b?", "/e", "/usr/x", "~/x", "r", "r/s", "/opt"]
)
NET_RULES = [
    "example", "a.example", "a.example:443", "b.example:80", "x.a.example", "*.example", "*.a.example:443",
    "tcp://a.example:443", "tcp://*.example:22", "!a.example", "!a.example:80", "!*.a.example",
    "8.8.8.8", "8.8.8.0/24:443", "8.8.0.0/16", "0.0.0.0/0", "10.0.0.1", "10.0.0.0/8", "::/0", "64:ff9b::/96",
    "udp://a.example:443", "udp://*.example:22", "udp://8.8.8.0/24:443", "udp://*:443", "udp://10.0.0.1:22",
    "*", "*:443", "*:22", "tcp://*:22", "!*:22", "!*",
    "!*.example:22", "2606:2800::/32", "!8.8.8.8", "!8.8.0.0/16:443", "!::/0", "!10.0.0.0/8",
]  # fmt: skip
POLICIES = st.builds(
    Policy,
    profile=st.sampled_from(PROFILES),
    read=st.lists(PATHS, max_size=3),
    write=st.lists(PATHS, max_size=2),
    deny=st.lists(
        st.sampled_from(["/a/b", "/a/b/c", "/e", "/usr/x", "~/x", "r", "/a/*", "/a/**/x?", "*", "**/c"]),
        max_size=2,
    ),
    exec=st.none()
    | st.lists(st.sampled_from(["/usr/bin/*", "/usr/bin/sh", "/usr/**", "/b?"]), min_size=1, max_size=2),
    protect=st.lists(st.sampled_from(["b", "b/c", "x"]), max_size=2),
    hold_back=st.lists(st.sampled_from(["b/c", "c", "**/c", "*"]), max_size=2),
    allow_commit=st.lists(st.sampled_from(["b/c", "c", "**/c"]), max_size=2),
    net=st.just("open") | st.lists(st.sampled_from(NET_RULES), max_size=4),
    env=st.sampled_from([{}, {"A": "1"}]),
    delegate=st.booleans(),
    on_egress_end=st.sampled_from(["continue", "end"]),
    receipts=st.sampled_from(["each", "batched"]),
    pass_env=st.lists(st.sampled_from(["A", "B", "TERM"]), max_size=2),
    backend=st.sampled_from(["auto", "native", "landlock", ("landlock", "native")]),
    accept=st.sampled_from([(), (Control.LIMITS_TASKS,), tuple(map(Control, ACCEPTED))]),
    workspace=st.none()
    | st.builds(
        lambda path, mode, durable: {"path": path, "mode": mode, "durable": durable},
        st.sampled_from(["/a", "/a/b", "/a/b/c", "."]),
        st.sampled_from(["ro", "overlay", "rw"]),
        st.booleans(),
    ),
    limits=st.fixed_dictionaries(
        {},
        optional={
            "tasks": st.sampled_from([8, 256, 512]),
            "wall": st.sampled_from([1, 2]),
            "disk": st.sampled_from([4096, 8192]),
        },
    ),
    syscalls=st.sampled_from([{}, {"allow": ["ptrace"]}, {"deny": ["ptrace"]}, {"deny": ["ptrace", "bpf"]}]),
)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(NET_RULES), max_size=4), st.lists(st.sampled_from(NET_RULES), max_size=4))
def test_within_means_no_further_connection(one: list[str], two: list[str]) -> None:
    """To names, to addresses, and to the addresses that names lead to."""
    if not Policy(net=one).within(Policy(net=two)):
        return
    mine, other = (RuleSet([parse_rule(text) for text in texts]) for texts in (one, two))
    addresses = ("8.8.8.8", "8.8.4.4", "10.0.0.1", "64:ff9b::808:808", "2606:2800::1", "::1", "1.1.1.1")
    for port, udp in [(22, False), (80, False), (443, False), (22, True), (443, True)]:
        for name in ("example", "a.example", "b.example", "x.a.example", "y.x.a.example", "z.b.example"):
            had, got = mine.for_name(name, port, udp=udp), other.for_name(name, port, udp=udp)
            assert got.allowed or not had.allowed
            assert got.opaque or not had.opaque
            for ip in addresses if had.allowed else ():
                assert mine.denies_address(ip, port) >= 0 or other.denies_address(ip, port) < 0
        for ip in addresses:
            got, had = other.for_address(ip, port, udp=udp), mine.for_address(ip, port, udp=udp)
            assert got.allowed or not had.allowed


@given(POLICIES)
def test_a_policy_is_within_itself(policy: Policy) -> None:
    assert policy.within(policy)
    assert Policy(**policy.table()).within(policy)


@given(POLICIES, POLICIES, POLICIES)
def test_within_is_transitive(one: Policy, two: Policy, three: Policy) -> None:
    if one.within(two) and two.within(three):
        assert one.within(three)


@given(POLICIES, POLICIES)
def test_within_means_no_more_access_to_any_path(one: Policy, two: Policy) -> None:
    if one.within(two):
        mine, other = PathAccess(one), PathAccess(two)
        for path in (
            "/a",
            "/a/b",
            "/a/b/c/z",
            "/a/x",
            "/a/d/e",
            "/e/f",
            "/usr/x/y",
            "~/x",
            "./r/s/t",
            "/",
            "./b",
        ):
            assert mine.at(path)[0] <= other.at(path)[0]


@given(POLICIES, st.data())
def test_taking_a_grant_away_narrows(policy: Policy, data: st.DataObject) -> None:
    table = policy.table(full=True)
    for key in ("pass_env", "accept"):
        table[key] = table[key][:-1]
    table["net"] = []
    table["limits"] = {"tasks": 8, "wall": 1, "disk": 1}
    table["deny"] = [*table["deny"], "/a/b/c"]
    table.setdefault("exec", ["/usr/bin/sh"])
    # Taking a read away can uncover a write around it; taking the writes away first cannot.
    table["write"] = []
    if table.get("workspace", {}).get("mode", "ro") == "ro":
        table["read"] = (
            data.draw(st.lists(st.sampled_from(table["read"]), unique=True)) if table["read"] else []
        )
    assert Policy(**table).within(policy)


@given(POLICIES)
def test_excess_and_within_agree(policy: Policy) -> None:
    assert Policy().within(policy) == (not Policy().excess(policy))


WEAKER: dict[str, Any] = {"accept": ACCEPTED}
SECRET = {"from_env": "A", "hosts": ["a.example"]}
WIDER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"hold_back": ["deploy"]}, "hold_back"),
    ({"allow_commit": [".vscode"]}, {}, "allow_commit"),
    (
        {"workspace": "/a/b", "hold_back": ["b/c"]},
        {"workspace": "/a", "hold_back": ["b/c"]},
        'without hold_back = "c" in /a/b',
    ),
    (
        {"workspace": "/a/b", "allow_commit": ["c"]},
        {"workspace": "/a", "allow_commit": ["c"]},
        'allow_commit = "c" in /a/b',
    ),
    ({"workspace": "/a/.github"}, {"workspace": "/a"}, "a commit there does not see"),
    ({"workspace": "/a/$$b/hooks"}, {"workspace": "/a"}, "files of a repository"),
    ({"workspace": "/a"}, {"workspace": "/a/b", "write": ["/a"]}, "by rules of a directory above it"),
    (
        {"workspace": {"path": "/a", "mode": "rw"}, "unprotect": [".git"]},
        {"workspace": {"path": "/a", "mode": "rw"}},
        "unprotect",
    ),
    ({"read": ["/a"]}, {}, "read /a"),
    ({"write": ["/a/b"]}, {"read": ["/a"]}, "write /a/b"),
    ({"write": ["/a"]}, {"write": ["/a/b"]}, "write /a"),
    ({"write": ["/a"]}, {"write": ["/a"], "read": ["/a/b"]}, "write /a/b"),
    ({"read": ["/ab"]}, {"read": ["/a"]}, "read /ab"),
    ({"read": ["../x"]}, {"read": ["."]}, "read ../x"),
    ({"workspace": "/a"}, {}, "change a copy of /a"),
    ({"workspace": {"path": "/a", "mode": "rw"}}, {"workspace": "/a"}, "write /a"),
    ({"workspace": "/"}, {"workspace": "/a"}, "change a copy of /"),
    ({"workspace": "/a", "protect": []}, {"workspace": "/a"}, "change a copy of /a/.claude"),
    ({"workspace": "/a/b", "protect": []}, {"workspace": "/a", "protect": ["b"]}, "change a copy of /a/b"),
    ({"read": ["/a"]}, {"read": ["/a"], "deny": ["/a/b"]}, "read /a/b"),
    ({"read": ["/a/b/c"]}, {"read": ["/a"], "deny": ["/a/b"]}, "read /a/b/c"),
    ({"workspace": "/a"}, {"workspace": "/a", "deny": ["/a/.env"]}, "change a copy of /a/.env"),
    ({}, {"deny": ["/usr/bin/sudo"]}, "read /usr/bin/sudo"),
    ({"workspace": "/a"}, {"workspace": "/a", "deny": [".env"]}, "change a copy of /a/.env"),
    ({"workspace": "/a", "deny": ["/.env"]}, {"workspace": "/a", "deny": [".env"]}, "a copy of /a/.env"),
    ({"workspace": "/a"}, {"workspace": "/a", "deny": ["**/*.pem"]}, 'without deny = "/a/**/*.pem"'),
    ({"read": ["/a/b"]}, {"read": ["/a"], "deny": ["/a/**/x?"]}, 'without deny = "/a/**/x"'),
    ({"read": ["/a"], "deny": ["/a/*.pem"]}, {"read": ["/a"], "deny": ["/a/x.pem"]}, "read /a/x.pem"),
    ({"read": ["/a*"]}, {"read": ["/a*"], "deny": ["/a[*]/x"]}, "read /a*/x"),
    ({}, {"exec": ["/usr/bin/*"]}, "execute any file, where only "),
    ({"exec": ["/usr/bin/sh"]}, {"exec": ["/usr/bin/ls"]}, "execute /usr/bin/sh"),
    ({"exec": ["/usr/bin/*"]}, {"exec": ["/usr/bin/s*"]}, "execute /usr/bin/*"),
    ({"exec": ["/usr/bin/x/y"]}, {"exec": ["/usr/bin/*"]}, "execute /usr/bin/x/y"),
    ({}, {"limits": {"disk": "1M"}}, 'limits.disk: none where "1M" is allowed'),
    ({}, {"limits": {"connections": 5}}, "limits.connections: none where "),
    ({}, {"limits": {"requests": 5}}, "limits.requests: none where "),
    ({}, {"limits": {"upload": "1M"}}, "limits.upload: none where "),
    ({}, {"limits": {"download": "1M"}}, "limits.download: none where "),
    ({}, {"limits": {"host_connections": 5}}, "limits.host_connections: none where "),
    ({}, {"limits": {"host_requests": 5}}, "limits.host_requests: none where "),
    ({}, {"limits": {"host_upload": "1M"}}, "limits.host_upload: none where "),
    ({}, {"limits": {"host_download": "1M"}}, "limits.host_download: none where "),
    ({"proxy": True}, {}, "proxy = true: a proxy inside"),
    ({"net": ["ask"]}, {"net": ["a.example"]}, 'net = "ask"'),
    ({"net": ["a.example"]}, {"net": ["ask"]}, 'net = "a.example"'),
    ({"net": ["ask"]}, {"net": ["ask", "!a.example"]}, 'without net = "!a.example"'),
    ({"net": ["ask"]}, {"net": ["ask", "!a.example:8080"]}, 'without net = "!a.example:8080"'),
    ({"net": "open"}, {}, "net = "),
    ({"net": "open"}, {"net": ["a.example"]}, 'net = "open"'),
    ({"net": ["a.example"]}, {}, 'net = "a.example"'),
    ({"net": ["a.example"]}, {"net": ["b.example"]}, 'net = "a.example"'),
    ({"net": ["a.example"]}, {"net": ["a.example:443"]}, 'net = "a.example": ports 80'),
    ({"net": ["a.example:1-40"]}, {"net": ["a.example:1-20"]}, 'net = "a.example:1-40": ports 21-40'),
    ({"net": ["example"]}, {"net": ["*.example"]}, 'net = "example"'),
    ({"net": ["*.example"]}, {"net": ["a.example", "b.example"]}, 'net = "*.example"'),
    ({"net": ["*.example"]}, {"net": ["*.a.example"]}, 'net = "*.example"'),
    ({"net": ["*.evila.example"]}, {"net": ["*.a.example"]}, 'net = "*.evila.example"'),
    ({"net": ["tcp://a.example:443"]}, {"net": ["a.example:443"]}, 'net = "tcp://a.example:443"'),
    ({"net": ["8.8.8.0/23:443"]}, {"net": ["8.8.8.0/24:443"]}, 'net = "8.8.8.0/23:443"'),
    ({"net": ["*"]}, {"net": ["*.example", "0.0.0.0/0", "::/0"]}, 'net = "*"'),
    ({"net": ["*"]}, {"net": ["*:443"]}, 'net = "*": ports 80'),
    ({"net": ["udp://a.example:443"]}, {"net": ["*", "tcp://*:443"]}, 'net = "udp://a.example:443"'),
    ({"net": ["tcp://a.example:443"]}, {"net": ["udp://*:443"]}, 'net = "tcp://a.example:443"'),
    ({"net": ["udp://8.8.8.8:22"]}, {"net": ["8.8.8.8:22"]}, 'net = "udp://8.8.8.8:22"'),
    ({"net": ["udp://a.example:1-3"]}, {"net": ["udp://*:1-2"]}, 'net = "udp://a.example:1-3": ports 3'),
    ({"net": ["udp://*:1"]}, {"net": ["udp://*:1", "!a.example"]}, 'without net = "!a.example"'),
    ({"net": ["tcp://a.example:80"]}, {"net": ["*"]}, 'net = "tcp://a.example:80"'),
    ({"net": ["10.0.0.1"]}, {"net": ["*"]}, 'net = "10.0.0.1"'),
    ({"net": ["ask"]}, {"net": ["*"]}, 'net = "ask"'),
    ({"net": "open"}, {"net": ["*"]}, 'net = "open"'),
    ({"net": ["*"]}, {"net": ["*", "!a.example"]}, 'without net = "!a.example"'),
    ({"net": ["a.example"]}, {"net": ["*", "!*:80"]}, 'without net = "!*:80"'),
    ({"net": ["8.8.8.8"]}, {"net": ["*.example", "::/0"]}, 'net = "8.8.8.8"'),
    ({"net": ["10.0.0.1"]}, {"net": ["0.0.0.0/0"]}, 'net = "10.0.0.1"'),  # the wide rule leaves it out
    ({"net": ["169.254.169.254"]}, {"net": ["169.254.0.0/16"]}, 'net = "169.254.169.254"'),
    ({"net": ["*.example"]}, {"net": ["*.example", "!a.example"]}, 'without net = "!a.example"'),
    ({"net": ["a.example"]}, {"net": ["*.example", "!a.example"]}, 'without net = "!a.example"'),
    ({"net": ["*.a.example"]}, {"net": ["*.example", "!*.example:80"]}, 'without net = "!*.example:80"'),
    (
        {"net": ["*.example", "!a.example:80"]},
        {"net": ["*.example", "!a.example"]},
        'without net = "!a.example"',
    ),
    ({"net": ["*.example"]}, {"net": ["*.example", "!8.8.8.0/24"]}, 'without net = "!8.8.8.0/24"'),
    ({"net": ["8.8.0.0/16"]}, {"net": ["8.8.0.0/16", "!8.8.8.8"]}, 'without net = "!8.8.8.8"'),
    ({"net": ["64:ff9b::/96"]}, {"net": ["64:ff9b::/96", "!8.8.8.8"]}, 'without net = "!8.8.8.8"'),
    ({"pass_env": ["TOKEN"]}, {}, 'pass_env = "TOKEN"'),
    ({"syscalls": {"allow": ["ptrace"]}}, {}, 'syscalls.allow = "ptrace"'),
    ({}, {"syscalls": {"deny": ["ptrace"]}}, 'without syscalls.deny = "ptrace"'),
    ({"limits": {"tasks": 512}}, {}, "limits.tasks: 512 where 256 is allowed"),
    ({}, {"limits": {"wall": "30s"}}, 'limits.wall: none where "30s" is allowed'),
    ({}, {"limits": {"memory": "64M"}}, 'limits.memory: none where "64M" is allowed'),
    ({"limits": {"cpu": 2}}, {"limits": {"cpu": 1.5}}, "limits.cpu: 2.0 where 1.5 is allowed"),
    ({"limits": {"cpu_time": 61}}, {"limits": {"cpu_time": 60}}, 'limits.cpu_time: "61s" where "1m"'),
    ({"accept": ["limits.memory"]}, {}, 'accept = "limits.memory"'),
    ({}, {"limits": {"tasks": 256}}, "without requiring limits.tasks"),
    ({}, {"profile": "worker"}, 'limits.memory: none where "64M" is allowed'),
    ({"profile": "worker"}, {"limits": {"memory": "1G"}}, "without requiring limits.memory"),
    ({"profile": "worker"}, {"limits": {"cpu_time": "1m"}}, "without requiring limits.cpu_time"),
    ({"receipts": "batched"}, {}, 'receipts = "batched": runs return before their receipts are signed'),
    ({"reuse": {}}, {}, "reuse: runs in sandboxes that other runs have used"),
    ({"reuse": {"age": "11m"}}, {"reuse": {}}, 'reuse.age: "11m" where "10m" is allowed'),
    ({"reuse": {"requests": 9}}, {"reuse": {"requests": 8}}, "reuse.requests: 9 where 8 is allowed"),
    ({"accept": ["files"]}, {}, 'accept = "files"'),
    ({"profile": "dev"}, {}, "read /opt"),
    ({}, {"backend": "native"}, 'backend = "auto"'),
    (
        {"read": ["/a"], "accept": ["ipc"]},
        {"workspace": "/a", "accept": ["ipc"]},
        "connect to sockets in /a",
    ),
    ({"profile": "dev"}, {"read": ["/opt"]}, 'profile = "dev": searches the directories of your PATH'),
    ({"env": {"A": "2"}}, {"env": {"A": "1"}}, 'env.A = "2" where "1" is set'),
    ({"pass_env": ["A"]}, {"env": {"A": "1"}, "pass_env": ["A"]}, 'without env.A = "1"'),
    ({"workspace": "/a"}, {"workspace": {"path": "/a", "durable": True}}, "workspace.durable = false"),
    ({"workspace": "/a/b"}, {"workspace": {"path": "/a", "durable": True}}, "workspace.durable = false"),
    ({"write": ["/a"], "read": ["/a/b?"]}, {"write": ["/a"], "read": ["/a/b"]}, "write /a/b"),
    ({"write": ["/a"]}, {"write": ["/a"], "read": ["/a/b?"]}, "write /a/b"),
    ({"backend": "bwrap"}, {}, "bwrap may leave limits.tasks weaker"),
    (WEAKER | {"backend": "landlock"}, WEAKER, "landlock may leave files, processes, devices, limits.tasks"),
    (WEAKER | {"backend": ["native", "landlock"]}, WEAKER, "only where bwrap does not work"),
    (
        WEAKER | {"backend": "landlock"},
        WEAKER | {"backend": ["landlock", "native"]},
        "landlock may leave files",
    ),
    ({"toolchain": True}, {"toolchain": False}, "toolchain: shows the installs"),
    ({"toolchain": ["node"]}, {}, 'toolchain = "node"'),
    ({"delegate": True}, {}, "delegate = true"),
    (
        {"net": ["GET https://a.example/"], "net_roots": "/a.pem"},
        {"net": ["GET https://a.example/"]},
        'net_roots = "/a.pem" where "" is asked for',
    ),
    ({"net": ["GET,POST https://a.example/"]}, {"net": ["GET https://a.example/"]}, "net = "),
    ({"net": ["GET https://a.example/v1/**"]}, {"net": ["GET https://a.example/v1/*"]}, "net = "),
    ({"net": ["GET https://a.example/v1?x=*"]}, {"net": ["GET https://a.example/v1?x=1"]}, "net = "),
    ({"net": ["a.example:443"]}, {"net": ["* https://a.example/**"]}, "net = "),
    (
        {"net": ["GET https://a.example/**"]},
        {"net": ["GET https://a.example/**", "!GET https://a.example/admin/**"]},
        "without net = ",
    ),
    ({"secrets": {"A": SECRET}}, {}, "secrets.A: its value goes to a.example"),
    *(
        ({"secrets": {"A": mine}}, {"secrets": {"A": SECRET}}, f"secrets.A.{words}")
        for mine, words in (
            ({**SECRET, "from_env": "B"}, 'from_env = "B": another value'),
            ({**SECRET, "from_env": None, "from_file": "/b"}, 'from_file = "/b": another value'),
            ({**SECRET, "from_env": None, "from_command": ["b"]}, 'from_command = ["b"]: another value'),
            ({**SECRET, "hosts": ["a.example", "b.example"]}, 'hosts = "b.example"'),
            ({**SECRET, "hosts": ["http://a.example"]}, 'hosts = "http://a.example"'),
            ({**SECRET, "as": ["bearer", "body"]}, 'as = "body"'),
            ({**SECRET, "as": "body", "prefix": "x", "inside": "file"}, 'as = "body"'),
        )
    ),
    (
        {"net": ["a.example"]},
        {"net": ["a.example"], "on_egress_end": "end"},
        'on_egress_end = "continue": the program goes on without its egress process',
    ),
    ({"reuse": {"idle": "2m"}}, {"reuse": {}}, 'reuse.idle: "2m" where "1m" is allowed'),
    ({"limits": {"output": "11M"}}, {}, 'limits.output: "11M" where "10M" is allowed'),
    ({"limits": {"files": 2048}}, {}, "limits.files: 2048 where 1024 is allowed"),
    ({}, {"accept": [], "limits": {"tasks": 300}}, "without requiring limits.tasks"),
]


@pytest.mark.parametrize(("mine", "other", "words"), WIDER, ids=lambda value: str(value)[:50])
def test_what_goes_beyond_is_said_in_words(mine: dict[str, Any], other: dict[str, Any], words: str) -> None:
    found = Policy(**mine).excess(Policy(**other))
    assert any(words in line for line in found), found


WITHIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"net": ["ask", "a.example:8080"]}, {"net": ["ask", "a.example:8080", "b.example"]}),
    ({"net": ["ask", "!a.example"]}, {"net": ["ask", "!a.example:22"]}),
    ({"net": "ask"}, {"net": "open"}),
    ({"net": ["*"]}, {"net": "open"}),
    ({"net": ["a.example", "*.b.example", "8.8.0.0/16:443", "0.0.0.0/0"]}, {"net": ["*"]}),
    ({"net": ["GET https://a.example/"]}, {"net": ["*:443"]}),
    ({"net": ["tcp://a.example:22"]}, {"net": ["tcp://*:22"]}),
    ({"net": ["udp://a.example:1", "udp://8.8.8.8:1"]}, {"net": ["udp://*:1"]}),
    ({"net": ["a.example:80"]}, {"net": ["*", "!*:443"]}),
    ({"net": ["a.example", "!a.example:80"]}, {"net": ["*", "!*:80"]}),
    ({"net": ["a.example"], "proxy": True}, {"net": ["a.example"], "proxy": True}),
    ({"read": ["/a/b"]}, {"read": ["/a"]}),
    ({"read": ["/a//b/"]}, {"read": ["/a/b?"]}),
    ({"read": ["/a"]}, {"write": ["/a"]}),
    ({"read": ["/a"], "accept": ["ipc"]}, {"write": ["/a"], "accept": ["ipc"]}),
    ({"read": ["/usr/share"], "accept": ["ipc"]}, {"accept": ["ipc"]}),
    ({}, {"read": ["/usr/share"]}),
    ({"read": ["/usr/share"]}, {}),
    ({"read": ["x"]}, {"read": ["."]}),
    ({"workspace": {"path": "/a", "mode": "ro"}}, {"workspace": "/a"}),
    ({"workspace": "/a"}, {"workspace": {"path": "/a", "mode": "rw"}}),
    ({"workspace": "/a/b"}, {"workspace": "/a"}),
    ({"workspace": "/a", "protect": [".git", ".envrc", ".vscode", ".claude"]}, {"workspace": "/a"}),
    ({"read": ["/a"], "deny": ["/a/b"]}, {"read": ["/a"]}),
    ({"read": ["/a"], "deny": ["/a/b"]}, {"read": ["/a"], "deny": ["/a/b/c"]}),
    ({"read": ["/a"]}, {"read": ["/a"], "deny": ["/b"]}),
    ({"read": ["/a/b"], "deny": ["/a/b"]}, {}),
    ({"workspace": "/a", "deny": ["./.env"]}, {"workspace": "/a", "deny": ["/a/.env"]}),
    ({"workspace": "/a", "deny": ["**/x"]}, {"workspace": "/a", "deny": ["/a/**/x?"]}),
    ({"read": ["/a"], "deny": ["/a/b"]}, {"read": ["/a"], "deny": ["/a/b/*"]}),
    ({"read": ["/b"]}, {"read": ["/b"], "deny": ["/a/**/x", "**/x", ".env"]}),
    ({"exec": ["/usr/bin/sh"]}, {}),
    ({"exec": ["/usr/bin/sh", "/opt/a/b?"]}, {"exec": ["/usr/bin/*", "/opt/**"]}),
    ({"limits": {"disk": "1M"}}, {"limits": {"disk": "1G"}}),
    ({}, {"reuse": {}}),
    ({}, {"receipts": "batched"}),
    ({"reuse": {"idle": 1}}, {"reuse": {}}),
    ({"env": {"A": "1", "B": "2"}}, {"env": {"A": "1"}}),
    ({"env": {"A": "2"}}, {"pass_env": ["A"]}),
    ({"env": {"A": "2"}, "pass_env": ["A"]}, {}),
    ({"workspace": {"path": "/a", "durable": True}}, {"workspace": "/a"}),
    ({"workspace": "/a/b"}, {"workspace": {"path": "/c", "durable": True}, "write": ["/a"]}),
    ({"read": ["/a?"]}, {"read": ["/a"]}),
    ({"write": ["/a"], "read": ["/a/b?"]}, {"write": ["/a"], "read": ["/a/b?"]}),
    ({"write": ["/a"], "read": ["/a/b"]}, {"write": ["/a"], "read": ["/a/b?"]}),
    ({"pass_env": ["TERM"]}, {}),
    ({"limits": {"tasks": 3, "wall": 1}}, {"limits": {"wall": 1}}),
    ({"limits": {"memory": "64M", "cpu": 0.5, "cpu_time": 1}}, {"limits": {"memory": "1G", "cpu": 1}}),
    ({}, {"profile": "dev"}),
    ({}, {"profile": "net-client"}),
    ({"profile": "worker"}, {}),
    ({"limits": {"memory": "64M", "cpu_time": 1, "tasks": 64}}, {"profile": "worker"}),
    ({"backend": "native"}, {}),
    ({"backend": "landlock"}, {}),  # nobody accepts what it lacks: the run is refused
    ({"backend": "bwrap", "limits": {"tasks": 256}}, {}),
    ({"backend": ["landlock", "native"]}, {"backend": ["native", "landlock"]}),
    (WEAKER | {"backend": "native"}, WEAKER),
    (WEAKER | {"backend": ["landlock", "bwrap", "native"]}, WEAKER),
    (WEAKER | {"backend": "landlock"}, WEAKER | {"backend": "landlock"}),
    (WEAKER | {"backend": "landlock"}, WEAKER | {"backend": ["landlock", "seatbelt"]}),
    ({}, {"net": "open", "accept": ["files"], "syscalls": {"allow": ["ptrace"]}}),
    ({"net": ["*.example", "tcp://a.example:22", "10.0.0.0/8"]}, {"net": "open"}),
    ({}, {"net": ["a.example"]}),
    ({"net": ["!a.example"]}, {}),
    ({"net": ["a.example:443"]}, {"net": ["a.example"]}),
    ({"net": ["a.example"]}, {"net": ["a.example:80", "*.example:443"]}),
    ({"net": ["a.example", "*.b.example"]}, {"net": ["*.example"]}),
    ({"net": ["*.example"]}, {"net": ["*.example"]}),
    ({"net": ["a.example:443"]}, {"net": ["tcp://a.example:443"]}),
    ({"net": ["tcp://a.example:22"]}, {"net": ["tcp://*.example:22"]}),
    ({"net": ["tcp://8.8.8.8:22"]}, {"net": ["8.8.8.0/24:22"]}),
    ({"net": ["8.8.8.0/25", "2606:2800::1"]}, {"net": ["8.8.8.0/24", "::/0"]}),
    ({"net": ["10.0.0.1"]}, {"net": ["10.0.0.0/8"]}),
    ({"net": ["*.example", "!a.example"]}, {"net": ["*.example"]}),
    ({"net": ["*.example", "!*.a.example"]}, {"net": ["*.example", "!b.a.example"]}),
    ({"net": ["*.b.example"]}, {"net": ["*.example", "!a.example", "!*.a.example"]}),
    ({"net": ["a.example"]}, {"net": ["*.example", "!a.example:22"]}),
    ({"net": ["a.example", "!a.example:80"]}, {"net": ["a.example:443"]}),
    ({"net": ["*.example", "!8.0.0.0/8"]}, {"net": ["*.example", "!8.8.8.8"]}),
    ({"net": ["8.8.4.0/24"]}, {"net": ["8.8.0.0/16", "!8.8.8.8", "!a.example"]}),
]


def fields(model: type, before: str = "") -> Iterator[str]:
    """Every field of the model, with those of the tables in it, by dotted names."""
    hints = get_type_hints(model)
    for one in msgspec.structs.fields(model):
        hint = hints[one.name]
        yield before + one.encode_name
        several = "NAME." if get_origin(hint) is Mapping else ""
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from fields(inner, f"{before}{one.encode_name}.{several}")


def value(policy: Policy, name: str) -> object:
    if name.startswith("secrets."):
        inner = name.rpartition(".")[2].replace("as", "as_")
        return [getattr(one, inner) for one in policy.secrets.values()]
    found: object = policy
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def test_every_field_has_its_rule() -> None:
    """A new field fails here until somebody has said what "no more" means for it."""
    every = list(fields(Policy))
    assert {"env", "limits.memory", "workspace.durable", "reuse.idle"} <= set(every)
    assert list(clauses()) == every
    assert set(RULES) == set(every)


def test_every_field_is_in_a_pair_that_goes_beyond() -> None:
    pairs = [(Policy(**mine), Policy(**other)) for mine, other, _ in WIDER]
    for name in fields(Policy):
        seen = any(value(mine, name) != value(other, name) for mine, other in pairs)
        assert seen or name == "image", name  # of which there is one


@pytest.mark.parametrize("name", ["env", "limits", "limits.wall", "workspace.mode"])
def test_a_field_without_a_rule_is_beyond_wherever_it_differs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Policy(env={"A": "1"}, limits={"wall": 1}, workspace={"path": "/a", "mode": "ro"})
    wide = Policy(workspace="/a")
    assert narrow.within(wide)
    monkeypatch.delitem(RULES, name)
    assert narrow.excess(wide) == [f"{name}: differs, and no rule says which is more"]
    assert narrow.within(Policy(**narrow.table()))


@pytest.mark.parametrize(("mine", "other"), WITHIN, ids=lambda value: str(value)[:50])
def test_what_asks_for_no_more_is_within(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert Policy(**mine).excess(Policy(**other)) == []


def test_a_protected_path_stays_protected_whatever_else_is_granted() -> None:
    policy = Policy(workspace={"path": "/a", "mode": "rw"}, protect=["b"], write=["/a/b/c"])
    assert Policy(write=["/a/b/c"]).excess(policy) == ["write /a/b/c"]


def test_a_name_with_a_dollar_in_it_is_protected_by_that_name() -> None:
    """In a path a $ is written twice; in `protect` it is part of the name."""
    policy = Policy(workspace={"path": "/a", "mode": "rw"}, protect=["x$y"])
    assert Policy(write=["/a/x$$y"]).excess(policy) == ["write /a/x$$y"]
    within_home = Policy(profile="dev", write=["/h$$/go"])
    assert "write /h$$/go/bin" in excess(Policy(write=["/h$$/go"]), within_home, "/h$")


def test_many_optional_paths_in_each_other_are_compared_in_time() -> None:
    """A file of one MiB holds this many: a project must not hold up the command that refuses it."""
    nested = ["/a" * depth + "?" for depth in range(1, 1000)]
    begin = time.process_time()
    assert Policy(read=nested).excess(Policy()) == ["read /a"]
    assert Policy(read=nested).within(Policy(read=["/a"], write=nested))
    assert time.process_time() - begin < 20


def test_nothing_is_visible_without_a_clause() -> None:
    assert PathAccess(Policy()).at("/home/me") == NOTHING
    assert PathAccess(Policy()).at("/etc/shadow") == NOTHING


def test_a_policy_within_another_uses_none_but_its_backends() -> None:
    both, auto = Policy(backend=["landlock", "native"]), Policy()
    one = Policy(backend="native")
    assert one.within(both) and both.within(auto) and both.within(Policy(backend=["native", "landlock"]))
    assert not auto.within(both) and not both.within(one)


RW = {"path": "/a", "mode": "rw"}
#: In what is writable a repository is read-only unless a clause names it.
REPOSITORIES: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"write": ["/a/.git"]}, {"write": ["/a"]}, "write /a/.git"),
    ({"write": ["/a/b/.hg/x"]}, {"write": ["/a"]}, "write /a/b/.hg/x"),
    ({"write": ["/a/.git"]}, {"write": ["/a", "/a/.git/lfs"]}, "write /a/.git"),
    ({"write": ["/a/.git"]}, {"workspace": RW}, "write /a/.git"),
    ({"workspace": RW, "unprotect": [".git"]}, {"workspace": RW}, 'unprotect = "/a/.git"'),
    ({"workspace": RW, "unprotect": ["b/.git"]}, {"workspace": RW, "unprotect": [".git"]}, "unprotect"),
    ({"workspace": "/a", "unprotect": [".envrc"]}, {"workspace": "/a"}, "change a copy of /a/.envrc"),
]


@pytest.mark.parametrize(("mine", "other", "beyond"), REPOSITORIES)
def test_a_repository_that_a_clause_names_is_more(
    mine: dict[str, object], other: dict[str, object], beyond: str
) -> None:
    asked, had = Policy(**mine), Policy(**other)  # type: ignore[arg-type]
    assert any(beyond in words for words in asked.excess(had)), asked.excess(had)
    assert not asked.within(had)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"write": ["/a/b"]}, {"write": ["/a"]}),
        ({"write": ["/a/.git/lfs"]}, {"write": ["/a/.git"]}),
        ({"write": ["/a"]}, {"write": ["/a", "/a/.git"]}),
        ({"workspace": RW}, {"workspace": RW, "unprotect": [".git", ".envrc"]}),
        ({"workspace": {"path": "/a/.git", "mode": "rw"}}, {"write": ["/a/.git"]}),
    ],
)
def test_a_repository_that_no_clause_names_is_not(mine: dict[str, object], other: dict[str, object]) -> None:
    asked = Policy(**mine).excess(Policy(**other))  # type: ignore[arg-type]
    assert asked == []


def test_what_a_backend_may_leave_weaker_is_what_its_table_says() -> None:
    """The comparison must not load the backends; what it knows of them is theirs."""
    assert tuple(backends.BACKENDS) == BACKENDS
    for name in BACKENDS:
        own = backends.table(name).mechanisms
        before = [backends.table(better).mechanisms for better in BACKENDS[: BACKENDS.index(name)]]
        weaker = [c for c in Control if own[c].optional and any(own[c] != better[c] for better in before)]
        assert set(weaker) == set(WEAKER_BACKENDS.get(name, ()))
        assert all(own[c].never for c in weaker if c is not Control.LIMITS_TASKS)
