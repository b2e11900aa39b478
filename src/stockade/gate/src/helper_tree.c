/* What the usher adds to the tree that a helper has made, before any program runs.
 *
 * A child of the usher enters the helper's user and mount namespaces, where only init is so far, and it waits.
 *
 * A helper looks a destination up by its path, and follows links. In a tree of the host another program may put a link
 * on the way, and the helper, which has the host's root mounted beside the new one, would make its mount point on the
 * host. So it mounts what belongs into such a tree in private memory, and the usher moves it from there, by
 * descriptors, without following a link and without making anything.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <limits.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>

/* The user namespace that the mounts belong to: init is in one below it, without rights over them. */
int helper_tree_enter(int mounts)
{
	owned_fd owner = ioctl(mounts, NS_GET_USERNS);
	return owner < 0 || setns(owner, CLONE_NEWUSER) || setns(mounts, CLONE_NEWNS) ? -1 : 0;
}

static int place(const struct op *op)
{
	char from[32];
	snprintf(from, sizeof from, STAGING "/%u", (unsigned)op->a);
	owned_fd mount = sys_openat2(AT_FDCWD, from, O_PATH, RESOLVE_NO_SYMLINKS);
	owned_fd point = mount < 0 ? -1 : sys_openat2(AT_FDCWD, op->s[0], O_PATH, RESOLVE_NO_SYMLINKS);
	return point < 0 ? -1
			 : sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* A helper mounts terminals of the sandbox's own, but as many as the kernel has for all. */
static int bound_terminals(const struct op *op)
{
	char place[PATH_MAX];
	snprintf(place, sizeof place, "%s/pts", op->s[0]);
	return mount(NULL, place, NULL, MS_REMOUNT | MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,max=" MOST_TERMINALS);
}

/* Executes the operations of one type, and says how many there are; -1 if one fails. */
static int each(const struct plan *plan, uint32_t type, int (*execute)(const struct op *), unsigned *index)
{
	int count = 0;
	for (*index = 0; *index < plan->count; ++*index)
		if (plan->ops[*index].type == type) {
			count++;
			if (!sabotaged_op(*index) && execute(&plan->ops[*index]))
				return -1;
		}
	return count;
}

int helper_tree_finish(const struct plan *plan, unsigned *index)
{
	int placed = each(plan, OP_PLACE, place, index);
	*index = placed < 0 ? *index : 0;
	if (placed < 0 || (placed && umount2(STAGING, MNT_DETACH)))
		return -1;
	return each(plan, OP_DEVICES, bound_terminals, index) < 0 ? -1 : 0;
}
