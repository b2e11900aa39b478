"""Every refusal that is known from the field has its reason and its fix."""

from __future__ import annotations

import errno

import pytest
from msgspec.structs import replace

from stockade.host import GATE_PROBES, Host
from stockade.host.advice import SINCE, explain
from stockade.host.capabilities import LIBSECCOMP

HOST = Host.pretend()
UNSHARE = "unshare(CLONE_NEWUSER)"


def told(name: str, number: int, detail: str, host: Host = HOST) -> tuple[str, str]:
    return explain(name, number, detail, host, "/opt/stockade-gate")


@pytest.mark.parametrize("detail", ["mount tmpfs", "write /proc/self/uid_map", UNSHARE])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_ubuntu_restricts_user_namespaces_by_apparmor(detail: str, number: int) -> None:
    ubuntu = replace(HOST, sysctls={"kernel.apparmor_restrict_unprivileged_userns": "1"})
    reason, fix = told("userns", number, detail, ubuntu)
    assert "AppArmor" in reason and "kernel.apparmor_restrict_unprivileged_userns=1" in reason
    assert 'profile stockade-gate "/opt/stockade-gate" flags=(unconfined) { userns, }' in fix
    assert "/etc/apparmor.d/stockade-gate" in fix
    assert "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in fix


@pytest.mark.parametrize(
    ("container", "flags"),
    [
        ("docker", "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"),
        ("podman", "podman run --security-opt seccomp=unconfined"),
    ],
)
def test_a_container_names_the_flags_to_start_it_with(container: str, flags: str) -> None:
    # Ubuntu's setting is visible inside too, and is not what refuses unshare().
    inside = replace(HOST, container=container, sysctls={"kernel.apparmor_restrict_unprivileged_userns": "1"})
    reason, fix = told("userns", errno.EPERM, UNSHARE, inside)
    assert "container" in reason and UNSHARE in reason
    assert flags in fix


def test_a_masked_proc_in_podman() -> None:
    reason, fix = told("pidns", errno.EPERM, "mount proc", replace(HOST, container="podman"))
    assert "/proc are masked" in reason
    assert "unmask=ALL" in fix


def test_debians_switch_for_ordinary_users() -> None:
    debian = replace(HOST, sysctls={"kernel.unprivileged_userns_clone": "0"})
    assert (
        told("userns", errno.EPERM, UNSHARE, debian)[1] == "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    )
    assert "sysctl" not in told("userns", errno.EPERM, UNSHARE, replace(debian, uid=0))[1]


def test_too_many_user_namespaces() -> None:
    full = replace(HOST, sysctls={"user.max_user_namespaces": "100"})
    reason, fix = told("userns", errno.ENOSPC, UNSHARE, full)
    assert "user.max_user_namespaces=100" in reason
    assert "sysctl -w user.max_user_namespaces" in fix


def test_root_without_the_capability_to_map_itself() -> None:
    assert "SETFCAP" in told("userns", errno.EPERM, "write /proc/self/uid_map", replace(HOST, uid=0))[1]


def test_a_kernel_without_user_namespaces() -> None:
    assert told("userns", errno.EINVAL, UNSHARE)[1] == "use a kernel with CONFIG_USER_NS=y"


def test_the_memory_for_filters_is_used_up() -> None:
    reason, fix = told("seccomp", 524, "seccomp(SECCOMP_SET_MODE_FILTER)")
    assert "net.core.bpf_jit_limit" in reason and "sysctl -w net.core.bpf_jit_limit=" in fix


def test_a_sandbox_around_stockade_refuses_filters() -> None:
    reason, fix = told("seccomp", errno.ENOSYS, "seccomp(SECCOMP_SET_MODE_FILTER)")
    assert "the environment of Stockade" in reason and 'syscalls.allow = ["seccomp"]' in fix


@pytest.mark.parametrize("name", GATE_PROBES)
def test_an_old_kernel_is_told_which_version_it_would_take(name: str) -> None:
    reason, fix = told(name, errno.ENOSYS, "call", replace(HOST, kernel="2.6.32-754.el6"))
    needed = ".".join(map(str, SINCE[name]))
    assert f"needs Linux {needed}, this is 2.6.32-754.el6" in reason
    assert needed in fix


def test_wsl() -> None:
    reason, fix = told("userns", errno.EINVAL, UNSHARE, replace(HOST, kernel="4.4.0-19041-Microsoft"))
    assert "WSL 1" in reason and "wsl --set-version" in fix
    second = replace(HOST, kernel="5.10.16.3-microsoft-standard-WSL2")
    assert told("landlock", errno.ENOSYS, "landlock_create_ruleset", second)[1] == "in Windows: wsl --update"


def test_landlock_left_out_at_boot() -> None:
    reason, fix = told("landlock", errno.EOPNOTSUPP, "landlock_create_ruleset")
    assert "switched off at boot" in reason and "lsm=" in fix


def test_overlayfs_not_loaded() -> None:
    assert told("overlay", errno.ENODEV, "mount overlay")[1] == "sudo modprobe overlay"


def test_roots_tasks() -> None:
    reason, fix = told("nproc", 0, "root's tasks are not counted", replace(HOST, uid=0))
    assert "RLIMIT_NPROC does not count" in reason
    assert fix == "run Stockade as an ordinary user"


def test_another_supervisor_listens_already() -> None:
    assert "already listens" in told("notify", errno.EBUSY, "seccomp(SECCOMP_SET_MODE_FILTER)")[0]


def test_another_system() -> None:
    assert "darwin, not Linux" in told("userns", errno.ENOSYS, "userns", replace(HOST, system="darwin"))[0]


@pytest.mark.parametrize("name", GATE_PROBES)
def test_whatever_the_kernel_says_there_is_a_reason_and_a_fix(name: str) -> None:
    for number in [0, *errno.errorcode]:
        reason, fix = told(name, number, "some step")
        assert reason and fix, errno.errorcode.get(number)


def test_a_system_without_libseccomp_names_the_package() -> None:
    reason, fix = told("seccomp", errno.ENOENT, LIBSECCOMP)
    assert "pyseccomp does not find libseccomp" in reason
    assert fix.startswith("apt install libseccomp2, ")
