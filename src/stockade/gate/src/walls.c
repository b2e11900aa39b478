/* The walls that PID 1 raises on itself; whatever it starts inherits them. */
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

/* Below no_new_privs an execve gives nothing that was not permitted before, so what follows is a second
 * bolt; without a user namespace of its own only root can shove it. A helper has shoved it already: that nothing
 * is left to gain the supervisor sees. */
int wall_bounds(void)
{
	/* Without these, execve as uid 0 would fill the permitted set again. */
	if (prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP |
					     SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED |
					     SECBIT_NO_CAP_AMBIENT_RAISE |
					     SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED))
		return -1;
	/* EINVAL: past the last capability that this kernel has. */
	for (unsigned long cap = 0; prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0; cap++)
		;
	return errno == EINVAL ? 0 : -1;
}

int wall_privileges(const struct box *box)
{
	if (!box->bounded && wall_bounds() && !((box->warden || box->helped) && errno == EPERM))
		return -1;
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
		return -1;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0}};
	if (syscall(SYS_capset, &header, none))
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

int wall_landlock_begin(struct box *box, const struct op *op)
{
	struct landlock_attr attr = {
		.handled_access_fs = op->a,
		.handled_access_net = op->b & 0xffffffff,
		.scoped = sabotaged_scopes(op->b >> 32),
	};
	/* An older kernel refuses a larger structure even where the new fields are zero. */
	size_t size = attr.scoped ? sizeof attr : attr.handled_access_net ? 16 : 8;
	box->ruleset = (int)syscall(SYS_landlock_create_ruleset, &attr, size, 0);
	if (box->ruleset < 0)
		return -1;
	for (unsigned i = 0; i < box->plan.count && box->inner < 0; i++)
		if (box->plan.ops[i].type == OP_GRANT && (box->plan.ops[i].b & GRANT_GATE)) {
			box->inner = (int)syscall(SYS_landlock_create_ruleset, &attr, size, 0);
			if (box->inner < 0)
				return -1;
		}
	if (!(op->b >> 32))
		return 0;
	/* Born before the wall, so outside of it; the kernel gives it an abstract name. */
	sa_family_t unnamed = AF_UNIX;
	box->outsider = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* A process that has confined itself before can make no socket any more, so there is none to refuse. */
	if (box->outsider < 0 && box->itself && errno == EAFNOSUPPORT)
		return 0;
	if (box->outsider < 0 || bind(box->outsider, (struct sockaddr *)&unnamed, sizeof unnamed))
		return -1;
	return listen(box->outsider, 1);
}

int wall_landlock_grant(struct box *box, const struct op *op)
{
	uint32_t passed = (uint32_t)op->b;
	int path = passed ? box->descriptors[passed - 1] : open(op->s[0], O_PATH | O_CLOEXEC);
	if (path < 0)
		return -1;
	struct landlock_path rule = {.allowed_access = op->a, .parent_fd = path};
	int result = (int)syscall(SYS_landlock_add_rule, box->ruleset, LANDLOCK_PATH_RULE, &rule, 0);
	if (result == 0 && box->inner >= 0 && !(op->b & GRANT_GATE))
		result = (int)syscall(SYS_landlock_add_rule, box->inner, LANDLOCK_PATH_RULE, &rule, 0);
	int error = errno;
	if (!passed)
		close(path);
	errno = error;
	if (result == 0)
		box->rules++;
	return result;
}

int wall_landlock_enforce(struct box *box)
{
	return (int)syscall(SYS_landlock_restrict_self, box->ruleset, 0);
}

int wall_inner(int rules)
{
	return rules < 0 ? 0 : (int)syscall(SYS_landlock_restrict_self, rules, 0);
}

int wall_seccomp(struct box *box, const struct op *op)
{
	struct sock_fprog program = {
		.len = (unsigned short)(op->b / sizeof(struct sock_filter)),
		.filter = sabotaged_filter((void *)(uintptr_t)op->blob, op->b),
	};
	/* Of what the kernel is given, not of what the plan says. */
	sha256_text(program.filter, program.len * sizeof(struct sock_filter), box->filter);
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}
