"""The system calls of an egress process, in two filters.

The gate installs the first one before it is ready. It starts the process under it, so this filter allows
what PID 1 of that sandbox and the first lines of the process need. The process then installs the second one,
"relay", before it reads anything: no file, no program, no further process, no new socket but TCP. If a rule
allows datagrams, both filters are those with "-udp": they allow sockets for UDP as well.
"""

from __future__ import annotations

import os
from functools import lru_cache

from stockade.backends.seccomp import bpf, syscalls
from stockade.errors import SetupError

_RELAY = """
read readv write writev pread64 pwrite64 close fstat lseek brk munmap mremap madvise msync mlock
munlock rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall futex sched_yield
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom getcpu
epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select pselect6
pipe2 splice tee dup dup3 accept4 connect shutdown getsockname getpeername recvmsg recvfrom
getpid gettid getuid geteuid getgid getegid exit exit_group set_robust_list rseq set_tid_address
"""
#: Refused with EACCES, as a file that one may not have: interpreters and libraries are prepared for that.
_FILES = """
open openat openat2 creat stat lstat statx access faccessat faccessat2 readlink readlinkat getdents
getdents64 chdir fchdir mkdir mkdirat mknod mknodat unlink unlinkat rename renameat renameat2 link linkat
symlink symlinkat truncate statfs getcwd
"""
#: Refused with EPERM, so that the error shows that it was a wall.
_OTHERS = """
execve execveat fork vfork clone kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open
pidfd_send_signal bind listen sendmmsg memfd_create prctl seccomp prlimit64 setrlimit setuid setgid setresuid
setresgid setgroups setsid shmget shmat msgget semget mq_open
"""
_BOUNDED = {
    "socket": "tcp sockets",
    "socketpair": "pairs of streams",
    "sendmsg": "messages",
    "sendto": "datagrams",
    "mmap": "no code in small pages",
    "mprotect": "no code",
    "ioctl": "sizes of queues",
    "fcntl": "own descriptors",
    "newfstatat": "open files",
    "setsockopt": "socket options",
    "getsockopt": "socket queries",
}
#: What the gate needs besides, to start the process and to wait for its end.
_GATE = """
clone wait4 waitid kill prctl seccomp setsid umask prlimit64 getrlimit setrlimit openat2 fchdir close_range
dup2 signalfd4 eventfd2 getppid getpgid getsid getrusage getresuid getresgid uname sysinfo sched_getaffinity
rt_sigtimedwait rt_sigpending getcwd arch_prctl
"""
_GATE_BOUNDED = {
    "clone": "namespaces",
    "prctl": "own filters",
    "seccomp": "no listeners",
    "prlimit64": "not the gate",
    "mmap": "small pages",
    "fcntl": "file commands",
}


def _relay() -> dict[str, str]:
    return (
        dict.fromkeys((*_OTHERS.split(), *syscalls.REFUSED), "refuse")
        | dict.fromkeys(_FILES.split(), "no file")
        | dict.fromkeys(_RELAY.split(), "allow")
        | _BOUNDED
    )


#: The resolver of names: it reads files, loads libraries, asks servers and has threads. The C library binds
#: the socket by which it asks for this host's addresses. It waits for the copy of itself that has tried its
#: walls before they were raised.
_RESOLVER = """
open openat stat lstat statx newfstatat access faccessat faccessat2 readlink readlinkat getdents64 statfs
fstatfs fadvise64 getcwd eventfd2 bind sendmmsg recvmmsg uname sysinfo sched_getaffinity getrlimit getppid
get_robust_list prctl arch_prctl membarrier wait4
"""
_RESOLVER_BOUNDED = {
    "socket": "no unix names",
    "mmap": "small pages",
    "mprotect": "allow",
    "sendmsg": "allow",
    "sendto": "allow",
    "clone": "namespaces",
    "prctl": "no filters",
    "fcntl": "file commands",
    "prlimit64": "itself",
}


_UDP = {"socket": "tcp and udp sockets"}

#: By what it is for: the answer to each call by its name; others are absent.
FILTERS = {
    "gate": _relay() | dict.fromkeys(_GATE.split(), "allow") | _GATE_BOUNDED,
    "gate-udp": _relay() | dict.fromkeys(_GATE.split(), "allow") | _GATE_BOUNDED | _UDP,
    "relay": _relay(),
    "relay-udp": _relay() | _UDP,
    "resolver": _relay() | dict.fromkeys(_RESOLVER.split(), "allow") | _RESOLVER_BOUNDED,
}


@lru_cache(maxsize=8)
def program(which: str, home: str = "") -> bytes:
    """Return one of the `FILTERS` as BPF bytes, compiled once per host and kept in the state `home`."""
    if not home:
        return _compile(FILTERS[which])
    return syscalls.kept(f"egress-{which}", (__file__,), home, lambda: _compile(FILTERS[which]))


def _compile(by_name: dict[str, str]) -> bytes:
    machine = os.uname().machine
    from stockade.backends.seccomp.socket_bounds import bounds

    if machine not in bpf.ARCHITECTURES:
        raise SetupError(
            f"Stockade has no system call filter for {machine}",
            stage="seccomp",
            hint="sandboxes run on " + " and ".join(bpf.ARCHITECTURES),
        )
    return bpf.program(machine, syscalls.by_number(by_name), bounds())
