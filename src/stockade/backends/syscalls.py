"""The system calls a sandboxed program may make.

An allowlist. What is not on it does not exist (ENOSYS), so that C libraries
fall back to what does; what is refused on principle answers EPERM, so that a
reader of the error knows it was a wall. libseccomp knows the numbers, and
`filters` writes the program.
"""

from __future__ import annotations

import os
from functools import lru_cache

import msgspec

from stockade import state
from stockade.backends import filters
from stockade.errors import PolicyError, SetupError

FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents
getdents64 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr
link linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat
newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat
statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat
ustat utime utimensat utimes vmsplice write writev cachestat
"""
MEMORY = """
brk get_mempolicy madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2
mlockall mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free
pkey_mprotect process_mrelease remap_file_pages
"""
PROCESSES = """
alarm arch_prctl capget capset execve execveat exit exit_group fork get_robust_list get_thread_area
getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid
getresuid getrlimit getrusage getsid gettid getuid ioprio_get kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl
restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_yield
seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid
setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack signalfd signalfd4
sysinfo tgkill time times tkill uname vfork wait4 waitid futex futex_waitv futex_wake futex_wait
futex_requeue
"""
TIME_AND_EVENTS = """
clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old
epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 getitimer gettimeofday nanosleep
poll ppoll pselect6 select setitimer timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime getrandom

"""
COMMUNICATION = """
accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify
mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 recvfrom
recvmmsg recvmsg semctl semget semop semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl
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

#: Where no namespace and no mount stands between the program and the host, these are answered so. Landlock
#: looks at none of them: they change or tell what is outside every grant, or meet others of the same user.
_REFUSED_ALONE = """
chmod fchmod fchmodat fchmodat2 chown fchown fchownat lchown utime utimes futimesat
shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""
#: File attributes, as on a file system that has none: programs that copy them go on.
_NOT_OFFERED_ALONE = """
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr getxattr lgetxattr listxattr llistxattr
"""
#: They would tell what happens in every directory of the host.
_ABSENT_ALONE = "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch"
ALONE = (
    dict.fromkeys(_REFUSED_ALONE.split(), "refuse")
    | dict.fromkeys(_NOT_OFFERED_ALONE.split(), "not offered")
    | dict.fromkeys(_ABSENT_ALONE.split(), "absent")
    | filters.BOUNDED_ALONE
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


class Kind(msgspec.Struct, frozen=True):
    """What a filter depends on besides the policy's own names."""

    #: The policy lists what may be executed.
    listed: bool = False
    #: There are no namespaces.
    alone: bool = False
    #: And the host's network is open.
    network: bool = False


WALLED = Kind()


def check_names(allow: tuple[str, ...], kind: Kind = WALLED) -> None:
    """Refuse names that no policy can allow, before anything is compiled."""
    for name in allow:
        if kind.alone and name in ALONE:
            raise PolicyError(
                f"syscalls.allow: {name!r} would reach past the walls where there are no namespaces",
                hint="remove it, or use a backend that has them",
            )
        if name in REFUSED or name == "clone3":
            raise PolicyError(
                f"syscalls.allow: {name!r} is refused to every sandbox",
                hint="remove it: no policy can allow it",
            )
        if name in filters.BOUNDED or (kind.listed and name in filters.BOUNDED_BY_EXEC):
            raise PolicyError(
                f"syscalls.allow: {name!r} is allowed already, within bounds that no policy can lift",
                hint="remove it",
            )


@lru_cache(maxsize=16)
def program(
    allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), home: str = "", kind: Kind = WALLED
) -> bytes:
    """The filter as BPF bytes, compiled once per host and kept in the state directory `home`."""
    check_names(allow, kind)
    if kind.alone and (needed := [name for name in deny if name.startswith("landlock_")]):
        raise PolicyError(
            f"syscalls.deny: {needed[0]!r} is how every command is put behind its wall here",
            hint="remove it, or use a backend with namespaces",
        )
    if not home:
        return compile_filter(allow, deny, kind)
    path = os.path.join(state.ensure(home), state.CACHE, f"filter-{fingerprint(allow, deny, kind)}.bpf")
    try:
        return _kept(path) or _keep(path, compile_filter(allow, deny, kind))
    except OSError as error:
        raise state.unusable(path, error) from None


def _kept(path: str) -> bytes:
    """The filter in a file; nothing if there is none, or what a crash left of one."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = file.read()
    except FileNotFoundError:
        return b""
    return b"" if len(found) % 8 else found  # an instruction has eight bytes


def _keep(path: str, compiled: bytes) -> bytes:
    state.cache(os.path.dirname(os.path.dirname(path)))
    temporary = f"{path}.{os.urandom(6).hex()}"  # threads may meet here
    with open(temporary, "wb") as file:
        file.write(compiled)
    os.rename(temporary, path)
    return compiled


def fingerprint(allow: tuple[str, ...], deny: tuple[str, ...], kind: Kind = WALLED) -> str:
    """What the compiled filter depends on, as a file name."""
    from stockade.digest import sha256

    digest = sha256()
    for source in (__file__, filters.__file__):
        with open(source, "rb", buffering=0) as file:
            digest.update(file.read())
    digest.update(repr((sorted(allow), sorted(deny), kind, os.uname().machine)).encode())
    return digest.hexdigest()[:32]


def compile_filter(allow: tuple[str, ...], deny: tuple[str, ...], kind: Kind = WALLED) -> bytes:
    """Compile the allowlist, with `allow` added to it and `deny` taken away."""
    machine = os.uname().machine
    if machine not in filters.ARCHITECTURES:
        raise SetupError(
            f"there is no system call filter for {machine}",
            stage="seccomp",
            hint="sandboxes run on " + " and ".join(filters.ARCHITECTURES),
        )
    return filters.program(machine, answers(allow, deny, kind))


def answers(allow: tuple[str, ...], deny: tuple[str, ...], kind: Kind = WALLED) -> dict[int, str]:
    """The answer to each system call of this architecture, by number; what has none does not exist."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"the system call filter cannot be compiled: {error}",
            stage="seccomp",
            hint="install libseccomp, for example with `apt install libseccomp2`",
        ) from error

    given = dict.fromkeys(ALLOWED | set(allow), "allow")
    given |= filters.BOUNDED | (filters.BOUNDED_BY_EXEC if kind.listed else {})
    if kind.alone:
        given |= ALONE | SOCKETS_ALONE[kind.network]
    given |= dict.fromkeys(REFUSED | set(deny), "refuse")
    found = {}
    for name, answer in given.items():
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number == -1 and name in (*allow, *deny):
            raise PolicyError(f"syscalls: there is no system call {name!r}")
        if number >= 0:  # other negative numbers are calls of other architectures
            found[number] = answer
    return found
