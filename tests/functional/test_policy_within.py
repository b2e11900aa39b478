"""One policy within another: by effect, reflexive, transitive, and said in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.controls import Control
from stockade.policy import Policy
from stockade.policy.compare import NONE, Files
from stockade.policy.model import PROFILES

PATHS = st.sampled_from(["/a", "/a/b", "/a/b/c", "/a/d?", "/e", "/usr/x", "~/x", "r", "r/s", "/opt"])
POLICIES = st.builds(
    Policy,
    profile=st.sampled_from(PROFILES),
    read=st.lists(PATHS, max_size=3),
    write=st.lists(PATHS, max_size=2),
    deny=st.lists(st.sampled_from(["/a/b", "/a/b/c", "/e", "/usr/x", "~/x", "r"]), max_size=2),
    exec=st.none()
    | st.lists(st.sampled_from(["/usr/bin/*", "/usr/bin/sh", "/usr/**", "/b?"]), min_size=1, max_size=2),
    protect=st.lists(st.sampled_from(["b", "b/c", "x"]), max_size=2),
    net=st.sampled_from([(), "open"]),
    env=st.sampled_from([{}, {"A": "1"}]),
    delegate=st.booleans(),
    pass_env=st.lists(st.sampled_from(["A", "B", "TERM"]), max_size=2),
    backend=st.sampled_from(["auto", "native"]),
    accept=st.lists(st.sampled_from([Control.FILES, Control.LIMITS_TASKS]), max_size=2),
    workspace=st.none()
    | st.builds(
        lambda path, mode: {"path": path, "mode": mode},
        st.sampled_from(["/a", "/a/b", "."]),
        st.sampled_from(["ro", "overlay", "rw"]),
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
        mine, other = Files(one), Files(two)
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
            assert mine.at(path) <= other.at(path)


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


WIDER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
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
    ({}, {"exec": ["/usr/bin/*"]}, "execute any file where only "),
    ({"exec": ["/usr/bin/sh"]}, {"exec": ["/usr/bin/ls"]}, "execute /usr/bin/sh"),
    ({"exec": ["/usr/bin/*"]}, {"exec": ["/usr/bin/s*"]}, "execute /usr/bin/*"),
    ({"exec": ["/usr/bin/x/y"]}, {"exec": ["/usr/bin/*"]}, "execute /usr/bin/x/y"),
    ({}, {"limits": {"disk": "1M"}}, 'limits.disk: none where "1M" is allowed'),
    ({"net": "open"}, {}, "net = "),
    ({"pass_env": ["TOKEN"]}, {}, 'pass_env = "TOKEN"'),
    ({"syscalls": {"allow": ["ptrace"]}}, {}, 'syscalls.allow = "ptrace"'),
    ({}, {"syscalls": {"deny": ["ptrace"]}}, 'without syscalls.deny = "ptrace"'),
    ({"limits": {"tasks": 512}}, {}, "limits.tasks: 512 where 256 is allowed"),
    ({}, {"limits": {"wall": "30s"}}, 'limits.wall: none where "30s" is allowed'),
    ({}, {"limits": {"memory": "64M"}}, 'limits.memory: none where "64M" is allowed'),
    ({"limits": {"cpu": 2}}, {"limits": {"cpu": 1.5}}, "limits.cpu: 2.0 where 1.5 is allowed"),
    ({"limits": {"cpu_time": 61}}, {"limits": {"cpu_time": 60}}, 'limits.cpu_time: "61s" where "1m"'),
    ({"accept": ["limits.memory"]}, {}, 'accept = "limits.memory"'),
    ({}, {"limits": {"tasks": 256}}, "without limits.tasks being required"),
    ({"reuse": {}}, {}, "reuse: sandboxes that other runs have used"),
    ({"reuse": {"age": "11m"}}, {"reuse": {}}, 'reuse.age: "11m" where "10m" is allowed'),
    ({"reuse": {"requests": 9}}, {"reuse": {"requests": 8}}, "reuse.requests: 9 where 8 is allowed"),
    ({"accept": ["files"]}, {}, 'accept = "files"'),
    ({"profile": "dev"}, {}, "read /opt"),
    ({}, {"backend": "native"}, 'backend = "auto"'),
]


@pytest.mark.parametrize(("mine", "other", "words"), WIDER, ids=lambda value: str(value)[:50])
def test_what_goes_beyond_is_said_in_words(mine: dict[str, Any], other: dict[str, Any], words: str) -> None:
    found = Policy(**mine).excess(Policy(**other))
    assert any(words in line for line in found), found


WITHIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"read": ["/a/b"]}, {"read": ["/a"]}),
    ({"read": ["/a//b/"]}, {"read": ["/a/b?"]}),
    ({"read": ["/a"]}, {"write": ["/a"]}),
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
    ({"exec": ["/usr/bin/sh"]}, {}),
    ({"exec": ["/usr/bin/sh", "/opt/a/b?"]}, {"exec": ["/usr/bin/*", "/opt/**"]}),
    ({"limits": {"disk": "1M"}}, {"limits": {"disk": "1G"}}),
    ({}, {"reuse": {}}),
    ({"reuse": {"idle": 1}}, {"reuse": {}}),
    ({"env": {"A": "2"}}, {"env": {"A": "1"}}),
    ({"pass_env": ["TERM"]}, {}),
    ({"limits": {"tasks": 3, "wall": 1}}, {"limits": {"wall": 1}}),
    ({"limits": {"memory": "64M", "cpu": 0.5, "cpu_time": 1}}, {"limits": {"memory": "1G", "cpu": 1}}),
    ({}, {"profile": "dev"}),
    ({}, {"profile": "net-client"}),
    ({"backend": "native"}, {}),
    ({}, {"net": "open", "accept": ["files"], "syscalls": {"allow": ["ptrace"]}}),
]


@pytest.mark.parametrize(("mine", "other"), WITHIN, ids=lambda value: str(value)[:50])
def test_what_asks_for_no_more_is_within(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert Policy(**mine).excess(Policy(**other)) == []


def test_a_protected_path_stays_protected_whatever_else_is_granted() -> None:
    policy = Policy(workspace={"path": "/a", "mode": "rw"}, protect=["b"], write=["/a/b/c"])
    assert Policy(write=["/a/b/c"]).excess(policy) == ["write /a/b/c"]


def test_nothing_is_visible_without_a_clause() -> None:
    assert Files(Policy()).at("/home/me") == NONE
    assert Files(Policy()).at("/etc/shadow") == NONE


def test_a_policy_within_another_uses_none_but_its_backends() -> None:
    both, auto = Policy(backend=["landlock", "native"]), Policy()
    one = Policy(backend="native")
    assert one.within(both) and both.within(auto) and both.within(Policy(backend=["native", "landlock"]))
    assert not auto.within(both) and not both.within(one)
