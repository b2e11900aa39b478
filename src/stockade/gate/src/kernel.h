/* What the kernel understands and the C library of older systems does not name.
 *
 * Debian 12's headers know Landlock as of ABI 1; the fields of later ABIs, and
 * the system calls that glibc 2.36 has no wrapper for, are defined here.
 */
#ifndef STOCKADE_KERNEL_H
#define STOCKADE_KERNEL_H

#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

struct landlock_attr {
	uint64_t handled_access_fs;
	uint64_t handled_access_net; /* ABI 4 */
	uint64_t scoped;             /* ABI 6 */
};

struct landlock_path {
	uint64_t allowed_access;
	int32_t parent_fd;
} __attribute__((packed));

struct landlock_port {
	uint64_t allowed_access;
	uint64_t port;
};

#define LANDLOCK_PATH_RULE 1
#define LANDLOCK_PORT_RULE 2 /* ABI 4 */
#define LANDLOCK_ABI_VERSION 1u
#define LANDLOCK_READ_FILE_AND_DIR (4u | 8u)
#define LANDLOCK_SCOPE_SIGNALS 2 /* ABI 6 */

/* Only as much of the attributes as `size` says: a kernel with an earlier ABI refuses a larger structure even where
 * the new fields are zero. */
static inline int sys_landlock_create_ruleset(const struct landlock_attr *attr, size_t size, unsigned flags)
{
	return (int)syscall(SYS_landlock_create_ruleset, attr, size, flags);
}

static inline int sys_landlock_add_rule(int ruleset, const struct landlock_path *rule)
{
	return (int)syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_PATH_RULE, rule, 0);
}

static inline int sys_landlock_add_port(int ruleset, const struct landlock_port *rule)
{
	return (int)syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_PORT_RULE, rule, 0);
}

/* As the sixth argument, which none of these calls has: the filter of an observed sandbox then notifies nobody, so that
 * the gate never waits for the observer. A program that does the same hides what it tries, and gains nothing: the
 * walls are the same. */
#define UNOBSERVED 0x53544b47u

static inline int sys_landlock_restrict_self(int ruleset)
{
	return (int)syscall(SYS_landlock_restrict_self, ruleset, 0, 0L, 0L, 0L, (long)UNOBSERVED);
}

static inline int sys_pidfd_open(pid_t pid)
{
	return (int)syscall(SYS_pidfd_open, pid, 0);
}

static inline int sys_pidfd_send_signal(int pidfd, int number)
{
	return (int)syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0);
}

static inline int sys_seccomp_filter(unsigned flags, void *program)
{
	return (int)syscall(SYS_seccomp, 1 /* SECCOMP_SET_MODE_FILTER */, flags, program);
}

static inline int sys_open_tree(int dir, const char *path, unsigned flags)
{
	return (int)syscall(SYS_open_tree, dir, path, flags);
}

static inline int sys_move_mount(int from, const char *source, int to, const char *target,
				 unsigned flags)
{
	return (int)syscall(SYS_move_mount, from, source, to, target, flags);
}

static inline int sys_mount_setattr(int dir, const char *path, unsigned flags,
				    struct mount_attr *attr)
{
	return (int)syscall(SYS_mount_setattr, dir, path, flags, attr, sizeof *attr);
}

static inline int sys_fsopen(const char *type)
{
	return (int)syscall(SYS_fsopen, type, 1 /* FSOPEN_CLOEXEC */);
}

static inline int sys_fsconfig(int fd, unsigned command, const char *key, const char *value)
{
	return (int)syscall(SYS_fsconfig, fd, command, key, value, 0);
}

static inline int sys_fsmount(int fd, unsigned attributes)
{
	return (int)syscall(SYS_fsmount, fd, 1 /* FSMOUNT_CLOEXEC */, attributes);
}

static inline int sys_openat2(int dir, const char *path, uint64_t flags, uint64_t resolve)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = resolve};
	return (int)syscall(SYS_openat2, dir, path, &how, sizeof how, 0L, (long)UNOBSERVED);
}

static inline int sys_open(const char *path, int flags)
{
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0L, 0L, (long)UNOBSERVED);
}

static inline int sys_execve(const char *path, char **argv, char **envp)
{
	return (int)syscall(SYS_execve, path, argv, envp, 0L, 0L, (long)UNOBSERVED);
}

static inline int sys_connect(int socket, const void *address, size_t size)
{
	return (int)syscall(SYS_connect, socket, address, size, 0L, 0L, (long)UNOBSERVED);
}

static inline int sys_close_range(unsigned first, unsigned last)
{
	return (int)syscall(SYS_close_range, first, last, 0);
}

#endif
