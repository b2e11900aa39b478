"""A policy is a checked, frozen value: what it takes, what it refuses, and in which words."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade import backends
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.policy import Limits, Policy, Syscalls, WorkspaceRule, values
from stockade.policy.model import PROFILES, PROTECT
from stockade.policy.profile import DIRECTORY, profile
from stockade.policy.schema import schema


def refusal(**clauses: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        Policy(**clauses)
    return caught.value


def test_the_default_policy_is_strict_without_workspace_or_network() -> None:
    policy = Policy()
    assert (policy.profile, policy.workspace, policy.net) == ("strict", None, ())
    assert policy.protect == PROTECT


def test_plain_values_become_models() -> None:
    policy = Policy(
        workspace=".", limits={"wall": "30s", "output": "1M"}, read=["/a", "/a"], env={"B": "", "A": "1"}
    )
    assert policy.workspace == WorkspaceRule(".", "overlay")
    assert policy.limits == Limits(wall=30.0, output=1 << 20)
    assert policy.read == ("/a",)
    assert list(policy.env) == ["A", "B"]
    assert Policy(read=[Path("/a")]).read == ("/a",)


def test_limits_of_the_whole_sandbox_are_kept_in_one_form_and_written_back() -> None:
    policy = Policy(limits={"memory": "64M", "cpu": "1.5", "cpu_time": "2m"})
    assert policy.limits == Limits(memory=64 << 20, cpu=1.5, cpu_time=120.0)
    assert Policy.from_toml(policy.to_toml()) == policy
    asked = policy.controls()
    assert asked[Control.LIMITS_MEMORY] == 'limits.memory = "64M"'
    assert asked[Control.LIMITS_CPU] == "limits.cpu = 1.5"
    assert asked[Control.LIMITS_CPU_TIME] == 'limits.cpu_time = "2m"'
    for control in (Control.LIMITS_MEMORY, Control.LIMITS_CPU, Control.LIMITS_CPU_TIME):
        assert control not in Policy().controls()
        assert policy.required(control)
        assert not Policy(limits=policy.limits, accept=[control]).required(control)


def test_accepted_controls_compare_equal_to_their_names() -> None:
    assert Policy(accept=["limits.tasks"]).accept == ("limits.tasks",) == (Control.LIMITS_TASKS,)


def test_policies_that_mean_the_same_are_equal_and_hash_alike() -> None:
    one = Policy(env={"A": "1", "B": "2"}, limits={"wall": "1m"}, workspace="x")
    two = Policy(env={"B": "2", "A": "1"}, limits=Limits(wall=60), workspace={"path": "x"})
    assert one == two
    assert hash(one) == hash(two)
    assert one.hash == two.hash
    assert re.fullmatch("[0-9a-f]{64}", one.hash)
    assert one.hash != Policy().hash


def test_a_policy_does_not_change() -> None:
    policy = Policy(env={"A": "1"})
    with pytest.raises(AttributeError):
        policy.net = "open"
    with pytest.raises(TypeError):
        policy.env["A"] = "2"
    with pytest.raises(TypeError):
        policy.env |= {"A": "2"}


def test_a_policy_survives_copying_and_pickling() -> None:
    policy = Policy(env={"A": "1"}, workspace=".", syscalls={"deny": ["ptrace"]})
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)


def test_replacing_a_clause_checks_it_too() -> None:
    assert msgspec.structs.replace(Policy(), limits={"wall": "5s"}).limits.wall == 5.0
    with pytest.raises(PolicyError, match="net"):
        msgspec.structs.replace(Policy(), net="closed")


UNSOUND: list[tuple[dict[str, Any], str, str]] = [
    ({"reed": ["/a"]}, 'reed = ["/a"]: there is no such key', "did you mean read?"),
    ({"limits": {"wal": 1}}, "limits.wal = 1: there is no such key", "did you mean limits.wall?"),
    ({"workspace": {"mod": "ro"}}, 'workspace.mod = "ro": there is no such key', "workspace.mode?"),
    ({"profile": "stric"}, 'profile = "stric"', "did you mean strict?"),
    ({"accept": ["limits.task"]}, 'accept = "limits.task": is not a known control', "limits.tasks?"),
    ({"accept": [3]}, "accept = 3", ""),
    ({"syscalls": {"allow": ["opnat"]}}, 'syscalls.allow = "opnat"', "did you mean openat?"),
    ({"syscalls": {"allow": ["UDP_CROK"]}}, "is not a socket option that a policy can open", "UDP_CORK"),
    ({"syscalls": {"allow": ["udp_cork"]}}, "is opened by another name", 'write "UDP_CORK"'),
    ({"syscalls": {"allow": ["Multicast"]}}, "is opened by another name", 'write "multicast"'),
    ({"syscalls": {"allow": ["IP_ADD_MEMBERSHIP"]}}, "is opened by another name", 'write "multicast"'),
    ({"syscalls": {"allow": ["TCP_NODELAY"]}}, "is open in every sandbox", "leave it out"),
    ({"syscalls": {"allow": ["VMSPLICE"]}}, "is not a socket option", "system calls are in small letters"),
    ({"syscalls": {"deny": ["UDP_CORK"]}}, 'syscalls.deny = "UDP_CORK": is not a system call', ""),
    ({"syscalls": {"allow": ["bpf"], "deny": ["bpf"]}}, 'syscalls.allow = "bpf": syscalls.deny', ""),
    ({"read": "/a"}, 'read = "/a": must be a list', 'read = ["/a"]'),
    ({"read": [""]}, 'read = "": is empty', ""),
    ({"read": ["?"]}, "is empty", ""),
    ({"read": ["a\0b"]}, "NUL", ""),
    ({"read": [b"/a"]}, "read", ""),
    ({"read": ["a/../b"]}, "..", ""),
    ({"read": ["/../etc"]}, "..", ""),
    ({"read": ["~root/x"]}, "~", "./~root/x"),
    ({"write": [7]}, "write = 7", ""),
    ({"deny": "/a"}, 'deny = "/a": must be a list', 'deny = ["/a"]'),
    ({"deny": ["./.env?"]}, 'deny = "./.env?": a denied path need not exist', "leave the ? out"),
    ({"deny": ["a/../b"]}, "..", ""),
    ({"protect": ["**/*.lock"]}, 'protect = "**/*.lock": takes no patterns', "name each path"),
    ({"deny": ["x" * 5000]}, "longer than a path can be", "above"),
    ({"deny": ["../.env"]}, "is relative to the workspace, and leads out of it", "in full"),
    ({"deny": ["key?.pem"]}, "? is not a wildcard here", "[?]"),
    ({"deny": ["k?y/*.pem"]}, "? is not a wildcard here", "[?]"),
    ({"deny": ["[id]/x"]}, "[...] is not a wildcard here", "[[]"),
    ({"deny": ["*.[pk]em"]}, "[...] is not a wildcard here", "[[]"),
    ({"deny": [".env.{a,b}"]}, "{...} is not a wildcard here", "[{]"),
    ({"deny": ["**.pem"]}, "** must stand alone between slashes", '"**/*.pem"'),
    ({"deny": ["a/b**/c"]}, "** must stand alone between slashes", ""),
    ({"exec": []}, "exec = []: no program could run", "leave it out"),
    ({"exec": "/bin/sh"}, 'exec = "/bin/sh": must be a list', ""),
    ({"exec": ["?"]}, "is empty", ""),
    ({"limits": {"disk": 0}}, "limits.disk = 0: must be at least one byte", '"1G"'),
    ({"protect": ["/etc"]}, 'protect = "/etc": must be a relative path', ""),
    ({"protect": ["a/../../b"]}, "protect", ""),
    ({"protect": ["."]}, "protect", ""),
    ({"net": "opne"}, 'net = "opne"', '"open"'),
    ({"net": True}, "net = true", ""),
    ({"net": "example.org:443"}, "rules are a list", 'write net = ["example.org:443"]'),
    ({"net": ["open"]}, 'net[0] = "open": is not a rule', 'write net = "open"'),
    (
        {"net": ["a.example", "b.example", "https://c.example"]},
        'net[2] = "https://c.example"',
        "c.example:443",
    ),
    ({"net": ["a.example", 443]}, "net[1] = 443", "api.example.com:443"),
    (
        {"net": ["GET https://a.example/v1", "a.example"]},
        "already allows everything",
        "* https://a.example/**",
    ),
    ({"net": ["GET https://a.example/v1", "*.example"]}, "already allows everything", "leave out one"),
    ({"net": ["!GET https://*.example/v1", "a.example"]}, "already allows everything", "leave out one"),
    ({"net": ["GET https://a.example/v1", "udp://*.example:443"]}, "already allows everything", "leave out"),
    ({"net": ["GET https://a.example/v1", "*"]}, "already allows everything", "* https://a.example/**"),
    ({"net": ["GET https://a.example/", "GET http://a.example:443/"]}, "another scheme", "one port"),
    ({"net_roots": "company.pem"}, "not an absolute path", "~/company.pem"),
    ({"net": ["a.example:1000-1063", "b.example:22"]}, "at most 64", "fewer"),
    ({"net": [f"h{n}.example" for n in range(257)]}, "net: has 257 rules", "*.example.com"),
    ({"env": {"A=B": "1"}}, "env", ""),
    ({"env": {"": "1"}}, "env", ""),
    ({"env": {"A": 1}}, "env.A = 1", 'A = "1"'),
    ({"env": {"A": "\0"}}, "env.A", ""),
    ({"env": ["A=1"]}, "env", "{ NAME"),
    ({"pass_env": ["A=1"]}, "pass_env", ""),
    ({"image": "debian"}, 'image = "debian"', "host"),
    ({"backend": "nativ"}, 'backend = "nativ"', "did you mean native?"),
    ({"backend": "gvisor"}, "this version does not have it", "native"),
    ({"workspace": 3}, "workspace = 3", ""),
    ({"workspace": ""}, "workspace", ""),
    ({"workspace": {"path": ".", "mode": "rww"}}, 'workspace.mode = "rww"', "did you mean rw?"),
    ({"limits": 3}, "limits = 3: must be a table", "tasks"),
    ({"limits": {1: 2}}, "limits", ""),
    ({"limits": {"tasks": 0}}, "limits.tasks = 0: must be between 1", ""),
    ({"limits": {"tasks": 1.5}}, "limits.tasks = 1.5: is not a whole number", ""),
    ({"limits": {"tasks": True}}, "limits.tasks = true", ""),
    ({"limits": {"files": -1}}, "limits.files", ""),
    ({"limits": {"memory": "1M"}}, 'limits.memory = "1M": must be at least 2M', ""),
    ({"limits": {"memory": "lots"}}, 'limits.memory = "lots": is not a size', '"10M"'),
    ({"limits": {"cpu": 0}}, "limits.cpu = 0: must be between 0.01 and 1024 cores", ""),
    ({"limits": {"cpu": float("nan")}}, "limits.cpu", ""),
    ({"limits": {"cpu": True}}, "limits.cpu = true: is not a number of cores", "0.5"),
    ({"limits": {"cpu": "half"}}, 'limits.cpu = "half": is not a number of cores', "0.5"),
    ({"limits": {"cpu_time": "never"}}, 'limits.cpu_time = "never": is not a time', '"30s"'),
    ({"limits": {"wall": "30 parsecs"}}, 'limits.wall = "30 parsecs": is not a time', '"30s"'),
    ({"limits": {"wall": 0}}, "limits.wall = 0", "30s"),
    ({"limits": {"wall": float("nan")}}, "limits.wall", ""),
    ({"limits": {"wall": float("inf")}}, "limits.wall", ""),
    ({"limits": {"wall": "1.s"}}, "limits.wall", ""),
    ({"limits": {"output": "10X"}}, 'limits.output = "10X": is not a size', '"10M"'),
    ({"limits": {"output": "1_0M"}}, "limits.output", ""),
    ({"limits": {"output": "٣M"}}, "limits.output", ""),
    ({"limits": {"output": "9" * 5000}}, "limits.output", ""),
]


@pytest.mark.parametrize(("clauses", "message", "hint"), UNSOUND, ids=lambda value: str(value)[:40])
def test_what_is_unsound_is_refused_by_key_and_value(
    clauses: dict[str, Any], message: str, hint: str
) -> None:
    error = refusal(**clauses)
    assert message in error.message
    assert hint in error.hint


def test_what_asks_for_nothing_may_be_written_already() -> None:
    assert Policy(secrets={}, workspace={"durable": False}) == Policy(workspace=".")
    with pytest.raises(PolicyError, match=r"workspace\.durable = 1: must be true or false"):
        Policy(workspace={"durable": 1})


def test_positional_clauses_are_refused_as_policy_errors() -> None:
    with pytest.raises(PolicyError, match="by name"):
        Policy("strict")
    with pytest.raises(PolicyError):
        WorkspaceRule(".", "rw", 3)


def test_long_values_are_cut_in_messages() -> None:
    assert len(refusal(profile="x" * 10_000).message) < 200


@given(st.integers(1, 10**6), st.sampled_from(sorted(values.SIZE_UNITS)))
def test_sizes_count_in_units_of_1024(number: int, unit: str) -> None:
    assert values.size("k", f"{number}{unit}") == number * values.SIZE_UNITS[unit]
    assert values.size("k", number) == values.size("k", str(number)) == number


@pytest.mark.parametrize(
    "text", ["512M", "512m", "512MB", "512mb", "512MiB", "512 MB", str(512 << 20), f"{512 << 20}B"]
)
def test_every_spelling_of_a_size_means_powers_of_1024(text: str) -> None:
    assert Limits(memory=text) == Limits(memory=512 << 20)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5min", 300), ("5 minutes", 300), ("30sec", 30), ("1.5h", 5400), ("2hours", 7200), ("250msec", 0.25)],
)
def test_units_of_time_may_be_spelled_out(text: str, seconds: float) -> None:
    assert Limits(wall=text) == Limits(wall=seconds)


@pytest.mark.parametrize("text", ["512X", "512MBB", "512iB", "M", "MB", "1.5G", "-1M", "512\nMB", "512M B"])
def test_what_is_no_size_stays_none(text: str) -> None:
    with pytest.raises(PolicyError, match="is not a size"):
        Limits(memory=text)


@pytest.mark.parametrize("text", ["5M", "5minx", "min", "5ss", "5hm", "1h30m", "-5s"])
def test_what_is_no_time_stays_none(text: str) -> None:
    with pytest.raises(PolicyError, match="is not a time"):
        Limits(wall=text)


def test_no_network_can_be_asked_for_by_name() -> None:
    assert Policy(net="none") == Policy(net=[]) == Policy()
    assert Policy.from_toml('net = "none"').hash == Policy().hash


def test_a_policy_that_does_not_mention_receipts_has_the_hash_that_it_always_had() -> None:
    known = "fe09a8958c68b4505436d7722535aee5ca26b03c1de017830acb25beb3be302f"
    assert Policy().hash == Policy(receipts="each").hash == known
    assert Policy(receipts="batched").hash != known and "receipts" not in Policy().to_toml()
    assert Policy.from_toml(Policy(receipts="batched").to_toml()) == Policy(receipts="batched")


def test_rules_of_the_network_have_one_spelling() -> None:
    policy = Policy(net=["API.example.com:443,80", "api.example.com", "!ads.example.com", "10.0.0.1/32"])
    assert policy.net == ("api.example.com", "!ads.example.com", "10.0.0.1")
    assert Policy(net={"b.example", "a.example"}).net == ("a.example", "b.example")  # type: ignore[arg-type]
    assert Policy.from_toml(policy.to_toml()) == policy
    assert Policy.from_toml(policy.to_toml()).hash == policy.hash


def test_rules_need_their_own_control_in_the_place_of_no_network() -> None:
    for net, wanted in (
        ((), {Control.NETWORK_NONE}),
        (["a.example:443"], {Control.NETWORK_RULES}),
        (["GET https://a.example/"], {Control.NETWORK_RULES, Control.NETWORK_HTTP}),
        ("open", set()),
    ):
        needed = Policy(net=net).controls()
        known = {Control.NETWORK_NONE, Control.NETWORK_RULES, Control.NETWORK_HTTP}
        assert known & set(needed) == wanted
    assert Policy(net=["a.example:443"]).controls()[Control.NETWORK_RULES] == 'net = ["a.example:443"]'
    assert Policy(net=["a.example"]).required("network.rules")


@given(st.integers(1, 8000), st.sampled_from(sorted(values.TIME_UNITS)))
def test_times_are_kept_in_seconds_and_written_back_alike(number: int, unit: str) -> None:
    seconds = values.time("k", f"{number}{unit}")
    assert seconds == pytest.approx(number * values.TIME_UNITS[unit])
    assert seconds is not None
    assert values.time("k", values.time_text(seconds)) == pytest.approx(seconds)


@given(st.text() | st.floats() | st.integers() | st.none() | st.lists(st.text()) | st.booleans())
def test_no_value_of_a_limit_escapes_as_another_error(value: Any) -> None:
    for name in Limits.__struct_fields__:
        try:
            Limits(**{name: value})
        except PolicyError as error:
            assert f"limits.{name}" in error.message


@given(
    st.dictionaries(
        st.sampled_from([*Policy.__struct_fields__, "reed", "secrets"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ),
    )
)
def test_no_clause_escapes_as_another_error(clauses: dict[str, Any]) -> None:
    try:
        policy = Policy(**clauses)
    except PolicyError:
        return
    assert Policy(**policy.table()) == policy


def test_every_run_needs_the_walls_that_have_no_clause() -> None:
    needed = Policy().controls()
    always = {"files", "processes", "ipc", "syscalls", "privileges", "environment", "devices", "terminal"}
    limits = {"limits.output", "limits.files", "limits.tasks"}
    assert set(needed) == {*always, *limits, "cleanup", "network.none"}
    assert set(needed.values()) == {"default"}


def test_a_clause_needs_its_control_and_is_named_for_it() -> None:
    policy = Policy(workspace=".", limits={"wall": "30s", "tasks": 9}, net="open", read=["/a"])
    needed = policy.controls()
    assert needed[Control.LIMITS_WALL] == 'limits.wall = "30s"'
    assert needed[Control.LIMITS_TASKS] == "limits.tasks = 9"
    assert needed[Control.FILES] == 'read = ["/a"]'
    more = Policy(deny=["/a"], exec=["/b"], limits={"disk": "1K"}).controls()
    assert more[Control.DENY] == 'deny = ["/a"]'
    assert more[Control.EXEC] == 'exec = ["/b"]'
    assert more[Control.LIMITS_DISK] == 'limits.disk = "1K"'
    assert Control.NETWORK_NONE not in needed
    assert {Control.WORKSPACE_OVERLAY, Control.PROTECT} <= set(needed)


def test_protection_is_needed_only_with_a_workspace_and_something_to_protect() -> None:
    assert Control.PROTECT not in Policy().controls()
    assert Control.PROTECT not in Policy(workspace=".", protect=[]).controls()
    assert Control.WORKSPACE_OVERLAY not in Policy(workspace={"mode": "ro"}).controls()


def test_a_limit_is_required_when_written_and_may_be_weaker_as_a_default() -> None:
    assert not Policy().required(Control.LIMITS_TASKS)
    assert Policy(limits={"tasks": 256}).required("limits.tasks")
    assert Policy().required("limits.files")
    assert not Policy().required("limits.wall")


def test_the_limits_of_a_profile_are_asked_for_and_required_only_where_the_policy_writes_them() -> None:
    worker = Policy(profile="worker")
    assert Control.NETWORK_NONE in worker.controls()
    for control in (Control.LIMITS_MEMORY, Control.LIMITS_CPU_TIME, Control.LIMITS_TASKS):
        assert worker.controls()[control] == "default"
        assert not worker.required(control)
    written = Policy(profile="worker", limits={"memory": "32M"})
    assert written.required("limits.memory")
    assert not written.required("limits.cpu_time")


def test_an_accepted_control_is_not_required() -> None:
    assert not Policy(limits={"tasks": 5}, accept=["limits.tasks"]).required("limits.tasks")
    assert not Policy(accept=["files"]).required("files")


def test_each_profile_has_a_file_and_takes_over_what_it_extends() -> None:
    assert {f"{name}.toml" for name in PROFILES} == {path.name for path in Path(DIRECTORY).iterdir()}
    strict, dev = profile("strict"), profile("dev")
    assert set(strict.etc) < set(dev.etc)
    assert (dev.system, dev.env, dev.limits) == (strict.system, strict.env, strict.limits)
    assert strict.limits == Limits(tasks=256, output="10M", files=1024)
    worker = profile("worker")
    assert (worker.system, worker.etc, worker.read) == (strict.system, strict.etc, strict.read)
    assert worker.limits == Limits(memory="64M", cpu_time="1s", tasks=64, output="10M", files=1024)
    assert profile("strict") is strict


@pytest.mark.parametrize("name", PROFILES)
def test_no_profile_shows_a_path_twice(name: str) -> None:
    assert len(profile(name).etc) == len(set(profile(name).etc))
    assert len(profile(name).read) == len(set(profile(name).read))


@pytest.mark.parametrize("name", PROFILES)
def test_no_profile_shows_credentials(name: str) -> None:
    shown = {path.removesuffix("?") for path in (*profile(name).etc, *profile(name).read)}
    secret = [
        "shadow",
        "gshadow",
        "sudoers",
        "ssh",
        "ssl",
        "ssl/private",
        "pki",
        "pki/tls",
        "npmrc",
        "pip.conf",
    ]
    secret += [
        "~",
        "~/.ssh",
        "~/.aws",
        "~/.config",
        "~/.cargo",
        "~/.npm",
        "~/.m2",
        "~/.gradle",
        "~/.local/share/uv",
        "~/.cargo/git",
        "~/.gnupg",
        "~/.local",
    ]
    assert shown.isdisjoint(secret)
    assert all(path.endswith("?") for path in (*profile(name).etc, *profile(name).read))


def test_the_words_of_the_model_are_those_of_the_program() -> None:
    hints = get_type_hints(Policy)
    assert set(get_args(hints["profile"])) == set(PROFILES)
    one, several = get_args(hints["backend"])
    assert set(get_args(one)) == {"auto", *backends.names()}
    assert set(get_args(get_args(several)[0])) == set(backends.names())


def test_the_schema_describes_the_forms_that_may_be_written() -> None:
    made = schema()
    models = made["$defs"]
    assert set(models["Policy"]["properties"]) == set(Policy.__struct_fields__)
    assert models["Policy"]["additionalProperties"] is False
    number, text = models["Limits"]["properties"]["wall"]["anyOf"]
    assert number["type"] == "number"
    for good in ("250ms", "30s", "1.5h", "7", "5min", "30 seconds"):
        assert re.search(text["pattern"], good)
        assert Limits(wall=good).wall
    assert not re.search(text["pattern"], "30 parsecs")
    for good in ("10M", "10MB", "10mib", "10B", "10"):
        assert re.search(models["Limits"]["properties"]["output"]["anyOf"][1]["pattern"], good)
        assert Limits(output=good).output
    assert {"type": "string", "minLength": 1} in models["Policy"]["properties"]["workspace"]["anyOf"]
    for clauses in (model.get("properties", {}) for model in models.values()):
        assert all(clause["description"] for clause in clauses.values())
    references = re.findall(r'"\$ref":"#/\$defs/(\w+)"', msgspec.json.encode(made).decode())
    assert set(references) <= set(models)


def test_syscalls_are_known_by_name() -> None:
    assert Syscalls(allow=["ptrace"]).allow == ("ptrace",)
