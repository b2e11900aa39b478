/* What the usher adds to the tree that a helper has made, before any program runs.
 *
 * A child of the usher enters the helper's user and mount namespaces, where only init is so far, and it waits.
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

/* A helper mounts terminals of the sandbox's own, but as many as the kernel has for all. */
static int bound_terminals(const struct op *op)
{
	char place[PATH_MAX];
	snprintf(place, sizeof place, "%s/pts", op->s[0]);
	return mount(NULL, place, NULL, MS_REMOUNT | MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,max=" MOST_TERMINALS);
}

int helper_tree_finish(const struct plan *plan, unsigned *index)
{
	for (*index = 0; *index < plan->count; ++*index) {
		const struct op *op = &plan->ops[*index];
		if (!sabotaged_op(*index) && op->type == OP_DEVICES && bound_terminals(op))
			return -1;
	}
	return 0;
}
