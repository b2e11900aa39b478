"""What a request for a sandbox may say."""

from __future__ import annotations

import pytest

from stockade import Policy, PolicyError
from stockade.server.wire import create_checks
from stockade.server.wire.errors import ApiError
from stockade.server.wire.lifecycle import PlatformSpec
from stockade.server.wire.request_policy import RefusedCalls, RequestPolicy, narrowed, with_clauses


def test_quantities_are_read_as_kubernetes_writes_them() -> None:
    found = create_checks.limits_of({"cpu": "1500m", "memory": "2Gi"})
    assert found == {"cpu": 1.5, "memory": 2 << 30}
    assert create_checks.limits_of({"memory": "1.5G"}) == {"memory": 1_500_000_000}


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"cpu": "two"}, "resourceLimits.cpu"),
        ({"cpu": "0"}, "resourceLimits.cpu"),
        ({"memory": "1X"}, "resourceLimits.memory"),
        ({"memory": "1"}, "resourceLimits.memory"),
        ({"gpu": "1"}, "resourceLimits.gpu"),
        ({"disk": "1G"}, "resourceLimits.disk"),
        ({"nvidia.com/gpu": "1"}, "resourceLimits.nvidia.com/gpu"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(resources: dict[str, str], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        create_checks.limits_of(resources)
    assert caught.value.status == 400 and caught.value.message.startswith(field)


@pytest.mark.parametrize("key", ["a", "a.b_c-d", "example.com/a", "A1"])
def test_labels_of_kubernetes_are_metadata(key: str) -> None:
    assert create_checks.check_metadata({key: "v", "empty": ""}) == {key: "v", "empty": ""}


@pytest.mark.parametrize(
    "key", ["", "-a", "a b", "/a", "Example.com/a", "a/b/c", "x" * 64, "opensandbox.io/a"]
)
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ApiError):
        create_checks.check_metadata({key: "v"})


def test_a_merge_patch_deletes_with_null() -> None:
    assert create_checks.merge_metadata({"a": "1", "b": "2"}, {"a": None, "c": "3", "d": None}) == {
        "b": "2",
        "c": "3",
    }


def test_a_platform_must_be_this_machine() -> None:
    assert create_checks.platform(PlatformSpec("linux")) == {"os": "linux"}
    for spec in (PlatformSpec("windows"), PlatformSpec("linux", "sparc")):
        with pytest.raises(ApiError):
            create_checks.platform(spec)


def test_a_request_adds_limits_and_refused_calls() -> None:
    asked = RequestPolicy(limits={"tasks": 16, "wall": "5m"}, syscalls=RefusedCalls(("ptrace",)))
    found = with_clauses(Policy(limits={"memory": "1G"}, syscalls={"deny": ["bpf"]}), asked)
    assert (found.limits.memory, found.limits.tasks, found.limits.wall) == (1 << 30, 16, 300)
    assert found.syscalls.deny == ("bpf", "ptrace")


def test_a_session_cannot_ask_for_more_than_its_sandbox() -> None:
    policy = Policy(limits={"tasks": 32})
    assert narrowed(policy, RequestPolicy(limits={"tasks": 8})).limits.tasks == 8
    with pytest.raises(ApiError, match=r"policy: goes beyond .*limits\.tasks"):
        narrowed(policy, RequestPolicy(limits={"tasks": 64}))


def test_a_wrong_clause_is_named() -> None:
    with pytest.raises(PolicyError, match=r"limits\.taks"):
        with_clauses(Policy(), RequestPolicy(limits={"taks": 1}))
    with pytest.raises(ApiError, match=r"policy\.limits\.disk"):
        create_checks.request_policy(RequestPolicy(limits={"disk": "1G"}))
