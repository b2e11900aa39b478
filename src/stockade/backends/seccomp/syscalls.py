"""The system calls that a sandboxed program may make.

This is an allowlist. A call that is not on it fails with ENOSYS, so that C libraries fall back to another
one; a call that is refused on principle fails with EPERM, so that the error shows that it was a wall.
libseccomp knows the numbers, and `bpf` writes the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import msgspec

from stockade import policy, state
from stockade.backends.seccomp import bpf
from stockade.errors import PolicyError, SetupError

FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents
getdents64 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr
link linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat
newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat
statfs statx symlink symlinkat sync sync_file_range syncfs truncate umask unlink unlinkat
utime utimensat utimes write writev cachestat
"""
MEMORY = """
brk get_mempolicy madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2
mlockall mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free
pkey_mprotect
"""
PROCESSES = """
alarm arch_prctl capget capset execve execveat exit exit_group fork get_robust_list get_thread_area
getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid
getresuid getrlimit getrusage getsid gettid getuid ioprio_get kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl
restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_yield
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid
setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack signalfd signalfd4
sysinfo tgkill time times tkill uname vfork wait4 waitid futex futex_waitv futex_wake futex_wait
futex_requeue
"""
TIME_AND_EVENTS = """
clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait
epoll_pwait2 epoll_wait eventfd eventfd2 getitimer gettimeofday nanosleep
poll ppoll pselect6 select setitimer timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime getrandom

"""
COMMUNICATION = """
accept accept4 bind connect getpeername getsockname listen mq_getsetattr mq_notify
mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 recvfrom
recvmmsg recvmsg semctl semget semop semtimedop sendmmsg sendmsg sendto shmat shmctl
shmdt shmget shutdown
"""
ALLOWED = frozenset(" ".join((FILES, MEMORY, PROCESSES, TIME_AND_EVENTS, COMMUNICATION)).split())

#: Refused on principle. No policy can allow these.
_REFUSED = """
mount umount2 umount pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount
fspick mount_setattr setns unshare
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd
bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
keyctl add_key request_key
init_module finit_module delete_module create_module kexec_load kexec_file_load
open_by_handle_at name_to_handle_at fanotify_init fanotify_mark lookup_dcookie
acct adjtimex clock_adjtime clock_settime settimeofday quotactl quotactl_fd reboot swapon swapoff
sethostname setdomainname syslog vhangup iopl ioperm modify_ldt nfsservctl mbind set_mempolicy
set_mempolicy_home_node migrate_pages move_pages uselib _sysctl
"""
REFUSED = frozenset(_REFUSED.split())

#: Absent, and no policy can allow these either. The flags of clone3 are in memory, where no filter can look.
#: memfd_secret splits the kernel's map of all memory, for good, and slows the whole machine down.
ABSENT = frozenset({"clone3", "memfd_secret"})

#: Refused without namespaces and mounts. Landlock does not check these calls: they change or reveal what is
#: outside every grant, or reach other processes of the same user.
_REFUSED_ALONE = """
chmod fchmod fchmodat fchmodat2 chown fchown fchownat lchown utime utimes futimesat
shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""
#: Answered as on a file system without file attributes: programs that copy them go on.
_NOT_OFFERED_ALONE = """
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr getxattr lgetxattr listxattr llistxattr
"""
#: They would reveal what happens in every directory of the host.
_ABSENT_ALONE = "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch"
ALONE = (
    dict.fromkeys(_REFUSED_ALONE.split(), "refuse")
    | dict.fromkeys(_NOT_OFFERED_ALONE.split(), "not offered")
    | dict.fromkeys(_ABSENT_ALONE.split(), "absent")
    | bpf.BOUNDED_ALONE
)
#: By whether the host's network is open.
SOCKETS_ALONE = {
    True: {"socket": "no unix names"},
    False: {
        "socket": "unsupported",
        "connect": "refuse",
        "bind": "refuse",
        "ioctl": "no requests to sockets",
    },
}


#: The sources of the checks on sockets, which are loaded only to compile them.
_SOCKETS = (
    os.path.join(os.path.dirname(__file__), "socket_bounds.py"),
    os.path.join(os.path.dirname(policy.__file__), "socket_options.py"),
)


class FilterKey(msgspec.Struct, frozen=True):
    """What a filter depends on besides the names in the policy."""

    #: Whether the policy lists what may be executed.
    listed: bool = False
    #: Whether there are no namespaces.
    alone: bool = False
    #: Whether, without namespaces, the host's network is open.
    network: bool = False


WALLED = FilterKey()


def check_names(allow: tuple[str, ...], kind: FilterKey = WALLED) -> None:
    """Refuse names that no policy can allow, before anything is compiled."""
    for name in allow:
        if kind.alone and name in ALONE:
            raise PolicyError(
                f"syscalls.allow: {name!r} would get past the walls without namespaces",
                hint="remove it, or use a backend with namespaces",
            )
        if name in REFUSED or name in ABSENT:
            raise PolicyError(
                f"syscalls.allow: {name!r} is refused in every sandbox",
                hint="remove it: no policy can allow it",
            )
        if name in bpf.BOUNDED or (kind.listed and name in bpf.BOUNDED_BY_EXEC):
            raise PolicyError(
                f"syscalls.allow: {name!r} is allowed already, within bounds that no policy can lift",
                hint="remove it",
            )


@lru_cache(maxsize=16)
def program(
    allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), home: str = "", kind: FilterKey = WALLED
) -> bytes:
    """Return the filter as BPF bytes, compiled once per host and kept in the state directory `home`."""
    check_names(allow, kind)
    if kind.alone and (needed := [name for name in deny if name.startswith("landlock_")]):
        raise PolicyError(
            f"syscalls.deny: the gate needs {needed[0]!r} to put every command behind its wall",
            hint="remove it, or use a backend with namespaces",
        )
    if not home:
        return compile_filter(allow, deny, kind)
    return _kept(home, fingerprint(allow, deny, kind), lambda: compile_filter(allow, deny, kind))


def kept(name: str, sources: tuple[str, ...], home: str, compiled: Callable[[], bytes]) -> bytes:
    """Return a filter of that name, compiled once per host and content of `sources`."""
    return _kept(home, _digest(sources, name), compiled)


def _kept(home: str, fingerprint: str, compiled: Callable[[], bytes]) -> bytes:
    path = os.path.join(state.ensure(home), state.CACHE, f"filter-{fingerprint}.bpf")
    try:
        return _load(path) or _save(path, compiled())
    except OSError as error:
        raise state.unusable(path, error) from None


def _load(path: str) -> bytes:
    """Return the filter in a file; empty if there is none, or only what a crash left of one."""
    try:
        with open(path, "rb", buffering=0) as file:
            compiled = file.read()
    except FileNotFoundError:
        return b""
    return b"" if len(compiled) % 8 else compiled  # an instruction has eight bytes


def _save(path: str, compiled: bytes) -> bytes:
    state.cache(os.path.dirname(os.path.dirname(path)))
    temporary = f"{path}.{os.urandom(6).hex()}"  # threads may meet here
    with open(temporary, "wb") as file:
        file.write(compiled)
    os.rename(temporary, path)
    return compiled


def fingerprint(allow: tuple[str, ...], deny: tuple[str, ...], kind: FilterKey = WALLED) -> str:
    """Return a hash of everything that the compiled filter depends on."""
    return _digest((), (sorted(allow), sorted(deny), kind))


def _digest(sources: tuple[str, ...], key: object) -> str:
    from stockade.linux.sha256 import sha256

    digest = sha256()
    for source in (__file__, bpf.__file__, *_SOCKETS, *sources):
        with open(source, "rb", buffering=0) as file:
            digest.update(file.read())
    digest.update(repr((key, os.uname().machine)).encode())
    return digest.hexdigest()[:32]


def compile_filter(allow: tuple[str, ...], deny: tuple[str, ...], kind: FilterKey = WALLED) -> bytes:
    """Compile the allowlist with the names of `allow` and without those of `deny`."""
    machine = os.uname().machine
    if machine not in bpf.ARCHITECTURES:
        raise SetupError(
            f"Stockade has no system call filter for {machine}",
            stage="seccomp",
            hint="sandboxes run on " + " and ".join(bpf.ARCHITECTURES),
        )
    from stockade.backends.seccomp.socket_bounds import bounds

    return bpf.program(machine, answers(allow, deny, kind), bounds(allow))


def answers(allow: tuple[str, ...], deny: tuple[str, ...], kind: FilterKey = WALLED) -> dict[int, str]:
    """Return the answer to each system call of this architecture, by number; others are absent."""
    from stockade.policy.socket_options import NAMES

    allow = tuple(name for name in allow if name not in NAMES)  # those of options are of `socket_bounds`
    by_name = dict.fromkeys(ALLOWED | set(allow), "allow")
    by_name |= bpf.BOUNDED | (bpf.BOUNDED_BY_EXEC if kind.listed else {})
    for name, bounds in bpf.BOUNDED_WITH.items():
        by_name |= bounds if name in allow and name not in deny else {}
    if kind.alone:
        by_name |= ALONE | SOCKETS_ALONE[kind.network]
    by_name |= dict.fromkeys(REFUSED | set(deny), "refuse")
    return by_number(by_name, (*allow, *deny))


def by_number(by_name: dict[str, str], named: tuple[str, ...] = ()) -> dict[int, str]:
    """Return the answers by number; refuse a name that the policy wrote and no architecture has."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"the system call filter cannot be compiled: {error}",
            stage="seccomp",
            hint="install libseccomp, for example with `apt install libseccomp2`",
        ) from error

    found = {}
    for name, answer in by_name.items():
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number == -1 and name in named:
            raise PolicyError(f"syscalls: there is no system call {name!r}")
        if number >= 0:  # other negative numbers are calls of other architectures
            found[number] = answer
    return found
