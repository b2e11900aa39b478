"""Namespaces: none can be entered, whether through /proc, a pidfd or a descriptor that was left open."""

from __future__ import annotations

import os

from attacks.arena import inside, outside


def test_no_namespace_can_be_entered() -> None:
    """The control owns its namespaces and may enter them once more."""
    given = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.set_inheritable(given, True)
    try:
        verdict = inside("setns")
        control = outside("setns", namespaces="user net uts ipc mnt pid", pass_fds=(given,))
    finally:
        os.close(given)
    through_gate = {place: answer for place, answer in verdict.items() if place.startswith("/proc/1/")}
    assert {tuple(answer) for answer in through_gate.values()} == {("not opened", "EACCES")}
    assert {answer for _, answer in verdict.values()} <= {"EPERM", "EACCES"}, verdict
    assert not [place for place in verdict if place.startswith("descriptor")]
    assert control["/proc/self/ns/net"] == control["/proc/self/ns/uts"] == ["opened", "ok"]


def test_every_namespace_is_another_than_the_hosts() -> None:
    kinds = ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")
    host = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
    theirs = inside("own_namespaces")
    assert not [kind for kind in kinds if theirs[kind] == host[kind]]
    assert outside("own_namespaces") == host
