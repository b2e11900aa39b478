"""Hosts that refuse namespaces, made for real around a command: by a setting, and by a container's filter."""

from __future__ import annotations

import os
import sys

#: The setting is each user namespace's own, so it is made in one that goes with the command.
NO_USER_NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    "sh",
)

#: What the default profile of Docker keeps from a container without capabilities.
REFUSED = """
acct add_key bpf clock_adjtime clock_settime create_module delete_module finit_module fsconfig fsmount
fsopen fspick init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mbind mount
mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree
perf_event_open pivot_root process_vm_readv process_vm_writev ptrace quotactl reboot request_key
set_mempolicy setns settimeofday swapoff swapon _sysctl sysfs umount umount2 unshare uselib userfaultfd
ustat vm86 vm86old io_uring_setup io_uring_enter io_uring_register chroot
"""
NEW_NAMESPACES = 0x7E020000


def main() -> None:
    """Put this process behind such a filter and become the command."""
    import pyseccomp
    from pyseccomp import Arg

    filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in REFUSED.split():
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
            filter.add_rule(pyseccomp.ERRNO(1), name)
    # Any of the flags: one rule for each bit.
    for bit in range(32):
        if NEW_NAMESPACES >> bit & 1:
            filter.add_rule(pyseccomp.ERRNO(1), "clone", Arg(0, pyseccomp.MASKED_EQ, 1 << bit, 1 << bit))
    # Its flags are in memory, where no filter can look.
    filter.add_rule(pyseccomp.ERRNO(38), "clone3")
    filter.load()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
