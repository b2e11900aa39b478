/* The walls that init raises on itself; the programs that it starts inherit them. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <sys/prctl.h>
#include <sys/socket.h>

/* Without the first two, execve as uid 0 would fill the permitted set again. Root that keeps capabilities is to have
 * them in the programs that it executes, and to lose them when it becomes another user. */
unsigned long securebits(uint64_t keep)
{
	const unsigned long always = SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED |
				     SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
	return keep ? always : always | SECBIT_NOROOT | SECBIT_NO_SETUID_FIXUP;
}

/* Below no_new_privs an execve gives nothing that was not permitted before, so what follows is a second
 * bolt; without a user namespace of its own only root can shove it. A helper has shoved it already: that nothing
 * is left to gain the supervisor sees. */
int wall_bounds(uint64_t keep)
{
	if (prctl(PR_SET_SECUREBITS, securebits(keep)))
		return -1;
	/* EINVAL: past the last capability that this kernel has. */
	for (unsigned long cap = 0;; cap++)
		if (!(cap < 64 && keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0))
			return errno == EINVAL ? 0 : -1;
}

int wall_privileges(const struct walls *walls, uint64_t keep)
{
	if (!walls->bounded && wall_bounds(keep) && !((walls->warden || walls->helped) && errno == EPERM))
		return -1;
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
		return -1;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct kept[2] = {{.effective = (uint32_t)keep, .permitted = (uint32_t)keep}, {0}};
	if (syscall(SYS_capset, &header, kept))
		return -1;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
	/* Last, because the id maps are written through /proc/PID, which this takes away. */
	return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

long session_keyring(void)
{
	return syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0);
}

int wall_keyring(void)
{
	return syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 ? -1 : 0;
}

int wall_landlock_begin(struct walls *walls, const struct plan *plan, const struct op *op)
{
	struct landlock_attr attr = {
		.handled_access_fs = op->a,
		.handled_access_net = op->b & 0xffffffff,
		.scoped = sabotaged_scopes(op->b >> 32),
	};
	size_t size = attr.scoped ? sizeof attr : attr.handled_access_net ? 16 : 8;
	walls->ruleset = sys_landlock_create_ruleset(&attr, size, 0);
	if (walls->ruleset < 0)
		return -1;
	for (unsigned i = 0; i < plan->count && walls->inner < 0; i++)
		if (plan->ops[i].type == OP_GRANT && (plan->ops[i].b & GRANT_GATE)) {
			walls->inner = sys_landlock_create_ruleset(&attr, size, 0);
			if (walls->inner < 0)
				return -1;
		}
	if (!(op->b >> 32))
		return 0;
	/* Born before the wall, so outside of it; the kernel gives it an abstract name. */
	sa_family_t unnamed = AF_UNIX;
	walls->outsider = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* A process that has confined itself before can make no socket any more, so there is none to refuse. */
	if (walls->outsider < 0 && walls->itself && errno == EAFNOSUPPORT)
		return 0;
	if (walls->outsider < 0 || bind(walls->outsider, (struct sockaddr *)&unnamed, sizeof unnamed))
		return -1;
	return listen(walls->outsider, 1);
}

int wall_landlock_grant(struct walls *walls, const int *descriptors, const struct op *op)
{
	uint32_t passed = (uint32_t)op->b;
	/* The plan has real names. A link was put there since, by a program that may write there, and would
	 * move the right (to execute, say) to whatever it leads to. */
	owned_fd opened = passed ? -1 : sys_openat2(AT_FDCWD, op->s[0], O_PATH, RESOLVE_NO_SYMLINKS);
	int path = passed ? descriptors[passed - 1] : opened;
	if (path < 0)
		return -1;
	struct landlock_path rule = {.allowed_access = op->a, .parent_fd = path};
	int result = sys_landlock_add_rule(walls->ruleset, &rule);
	if (result == 0 && walls->inner >= 0 && !(op->b & GRANT_GATE))
		result = sys_landlock_add_rule(walls->inner, &rule);
	if (result == 0)
		walls->rules++;
	return result;
}

int wall_landlock_port(struct walls *walls, const struct op *op)
{
	struct landlock_port rule = {.allowed_access = op->a, .port = op->b};
	int result = sys_landlock_add_port(walls->ruleset, &rule);
	if (result == 0 && walls->inner >= 0)
		result = sys_landlock_add_port(walls->inner, &rule);
	if (result == 0)
		walls->rules++;
	return result;
}

int wall_landlock_enforce(const struct walls *walls)
{
	return sys_landlock_restrict_self(walls->ruleset);
}

int wall_inner(int rules)
{
	return rules < 0 ? 0 : sys_landlock_restrict_self(rules);
}

int wall_seccomp(struct walls *walls, const struct op *op)
{
	struct sock_fprog program = {
		.len = (unsigned short)(op->b / sizeof(struct sock_filter)),
		.filter = sabotaged_filter((void *)(uintptr_t)op->blob, op->b),
	};
	/* Of what the kernel is given, not of what the plan says. */
	sha256_text(program.filter, program.len * sizeof(struct sock_filter), walls->filter);
	errno = sabotaged_seccomp();
	if (errno)
		return -1;
	int flags = observer_flags(), listener = sys_seccomp_filter((unsigned)flags, &program);
	return listener < 0 || flags == 0 ? listener : observer_listen(listener);
}
