"""The system calls a sandboxed program may make, and the filter that says so.

An allowlist compiled by libseccomp. What is not on it does not exist
(ENOSYS), so that C libraries fall back to what does; what is refused on
principle answers EPERM, so that a reader of the error knows it was a wall.
Calls of another architecture kill the process.
"""

from __future__ import annotations

import errno
import os
import struct
from functools import lru_cache

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
getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl prlimit64
restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid
setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack signalfd
signalfd4 sysinfo tgkill time times tkill uname vfork wait4 waitid futex futex_waitv futex_wake
futex_wait futex_requeue
"""
TIME_AND_EVENTS = """
clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old
epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 getitimer gettimeofday nanosleep
poll ppoll pselect6 select setitimer timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime getrandom io_cancel io_destroy
io_getevents io_pgetevents io_setup io_submit
"""
COMMUNICATION = """
accept accept4 bind connect getpeername getsockname getsockopt ioctl listen mq_getsetattr mq_notify
mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 recvfrom
recvmmsg recvmsg semctl semget semop semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl
shmdt shmget shutdown socketpair
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

NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW… flag, CLONE_NEWTIME (a bit of the exit signal) included
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
PERSONALITY_LINUX, PERSONALITY_QUERY = 0, 0xFFFFFFFF
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

#: What the hand-written opening of the filter has to know: AUDIT_ARCH_… and the number of ioctl.
MACHINES = {"x86_64": (0xC000003E, 16), "aarch64": (0xC00000B7, 29)}


def check_names(allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
    """Refuse names that the policy cannot have, before anything is compiled."""
    for name in allow:
        if name in REFUSED:
            raise PolicyError(
                f"syscalls.allow: {name!r} is refused to every sandbox",
                hint="remove it: no policy can allow it",
            )


@lru_cache(maxsize=16)
def program(allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), cache: str = "") -> bytes:
    """The filter as BPF bytes, compiled once per host and kept in the directory `cache`."""
    check_names(allow, deny)
    if not cache:
        return compile_filter(allow, deny)
    path = os.path.join(cache, f"filter-{fingerprint(allow, deny)}.bpf")
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        pass
    compiled = compile_filter(allow, deny)
    os.makedirs(cache, mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(compiled)
    os.rename(temporary, path)
    return compiled


def fingerprint(allow: tuple[str, ...], deny: tuple[str, ...]) -> str:
    """What the compiled filter depends on, as a file name."""
    import hashlib

    with open(__file__, "rb", buffering=0) as source:
        digest = hashlib.sha256(source.read())
    digest.update(repr((sorted(allow), sorted(deny), os.uname().machine)).encode())
    return digest.hexdigest()[:32]


def compile_filter(allow: tuple[str, ...], deny: tuple[str, ...]) -> bytes:
    """Compile the allowlist, with `allow` added to it and `deny` taken away."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"the system call filter cannot be compiled: {error}",
            stage="seccomp",
            hint="install libseccomp, for example with `apt install libseccomp2`",
        ) from error
    native = pyseccomp.Arch.NATIVE
    for name in (*allow, *deny):
        if pyseccomp.resolve_syscall(native, name) == -1:
            raise PolicyError(f"syscalls: there is no system call {name!r}")

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    # A balanced tree instead of one comparison after the other: the kernel tries the filter for every
    # call when it is loaded, so short ways through it make a start cheaper.
    rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)

    def add(action: int, name: str, *conditions: object) -> None:
        # A negative number is a call that this architecture does not have.
        if name not in deny and (number := pyseccomp.resolve_syscall(native, name)) >= 0:
            rules.add_rule(action, number, *conditions)

    arg, equal, unequal = pyseccomp.Arg, pyseccomp.EQ, pyseccomp.NE
    for name in sorted((ALLOWED | set(allow)) - set(deny)):
        add(pyseccomp.ALLOW, name)
    for name in sorted(REFUSED | set(deny)):
        if (number := pyseccomp.resolve_syscall(native, name)) >= 0:
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), number)
    # clone3 hides its flags behind a pointer, so it does not exist and clone is used instead.
    if "clone" not in allow:
        add(pyseccomp.ALLOW, "clone", arg(0, pyseccomp.MASKED_EQ, NEW_NAMESPACES & ~0x80, 0))
    for family in (AF_UNIX, AF_INET, AF_INET6):
        add(pyseccomp.ALLOW, "socket", arg(0, equal, family))
    add(pyseccomp.ALLOW, "socket", arg(0, equal, AF_NETLINK), arg(2, equal, NETLINK_ROUTE))
    unsupported = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    add(unsupported, "socket", arg(0, equal, AF_NETLINK), arg(2, unequal, NETLINK_ROUTE))
    for family in sorted({0, *range(3, 16)} - {AF_INET6}):
        add(unsupported, "socket", arg(0, equal, family))
    add(unsupported, "socket", arg(0, pyseccomp.GT, AF_NETLINK))
    for persona in (PERSONALITY_LINUX, PERSONALITY_QUERY):
        add(pyseccomp.ALLOW, "personality", arg(0, equal, persona))

    with open(os.memfd_create("filter"), "rb") as file:
        rules.export_bpf(file)
        file.seek(0)
        return terminal_refusals() + file.read()


def terminal_refusals() -> bytes:
    """The opening of the filter: no program types into a terminal it shares.

    The kernel looks at the low half of ioctl's request only, so a comparison
    of all 64 bits, which is what libseccomp makes, could be slipped past
    with a bit set in the high half (CVE-2019-7303).
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise SetupError(
            f"there is no system call filter for {machine}",
            stage="seccomp",
            hint="the native backend runs on " + " and ".join(MACHINES),
        )
    architecture, ioctl = MACHINES[machine]
    load, jump, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    number_at, architecture_at, request_at = 0, 4, 24
    refuse = 0x00050000 | errno.EPERM  # SECCOMP_RET_ERRNO
    return b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load, 0, 0, architecture_at),
            (jump, 0, 6, architecture),
            (load, 0, 0, number_at),
            (jump, 0, 4, ioctl),
            (load, 0, 0, request_at),
            (jump, 1, 0, TIOCSTI),
            (jump, 0, 1, TIOCLINUX),
            (give, 0, 0, refuse),
        )
    )
