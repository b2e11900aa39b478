/* Masks: layers of whiteouts that lie over the host's directories, so that names in them do not exist.
 *
 * A mask is a name, not a file: it holds whatever the host has or puts there. The directories on the
 * way to it are made like the host's, since a merged directory shows the attributes of the upper one.
 */
#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* The layer that holds the masks of that number, to lie over the host's directory. */
int mask_layer(const struct tree *tree, uint64_t number)
{
	char name[24];
	snprintf(name, sizeof name, "mask%u", (unsigned)number);
	return unseen_directory(tree, name);
}

/* A whiteout: overlayfs takes a character device 0:0 in a layer for "there is no such name", whatever
 * the layers below have or get. The kernel lets everybody make this one. `made`: it was not there yet. */
static int white_out(int directory, const char *name, int *made)
{
	struct stat info;
	*made = mknodat(directory, name, S_IFCHR, 0) == 0;
	if (*made)
		return 0;
	if (errno != EEXIST || fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW))
		return -1;
	errno = EEXIST;
	return S_ISCHR(info.st_mode) && info.st_rdev == 0 ? 0 : -1;
}

/* Makes a directory of masks look like the host's below it: what is merged shows the upper one's. */
static int copy_attributes(int directory, int like)
{
	static const char acl[] = "system.posix_acl_access";
	struct stat info;
	char from[32], to[32], rules[4096];
	if (fstat(like, &info))
		return -1;
	mode_t mode = info.st_mode & 07777;
	/* An owner that has no number here stays the caller; the host's directory keeps its own guard. */
	if (fchownat(directory, "", info.st_uid, info.st_gid, AT_EMPTY_PATH) && errno != EINVAL &&
	    errno != EPERM)
		return -1;
	snprintf(from, sizeof from, "/proc/self/fd/%d", like);
	snprintf(to, sizeof to, "/proc/self/fd/%d", directory);
	ssize_t size = getxattr(from, acl, rules, sizeof rules);
	/* Where there is a list, the mode's group bits are its mask and would give too much alone. */
	if (size >= 0 ? setxattr(to, acl, rules, (size_t)size, 0) != 0
		      : errno != ENODATA && errno != EOPNOTSUPP)
		mode &= (mode_t)~070;
	const struct timespec times[2] = {info.st_atim, info.st_mtim};
	return fchmodat(directory, ".", mode, 0) || utimensat(directory, ".", times, 0) ? -1 : 0;
}

/* One directory of a mask, and the host's below it. */
struct level {
	int at, source;
};

static void close_level(struct level *level)
{
	close_fd(&level->at);
	close_fd(&level->source);
}

/* One step of a mask towards its name. 1: went on, to `next`; 0: the name is hidden; -1: failed. */
static int descend(struct level here, const char *name, int last, struct level *next, int *made)
{
	const int flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	next->source = last ? -1 : openat(here.source, name, flags);
	if (next->source < 0)
		/* What is not there as a directory is hidden from there on, so that it cannot come. */
		return last || errno == ENOENT || errno == ENOTDIR || errno == ELOOP
			       ? white_out(here.at, name, made)
			       : -1;
	next->at = openat(here.at, name, flags);
	if (next->at < 0 && errno == ENOENT && mkdirat(here.at, name, 0700) == 0) {
		*made = 1;
		next->at = openat(here.at, name, flags);
	}
	/* Or another mask hides it already. */
	return next->at >= 0 ? 1 : errno == ENOTDIR ? 0 : -1;
}

int mask_name(const struct tree *tree, const struct op *op)
{
	char name[256];
	struct level here = {.source = open_source(tree->descriptors, op->s[2], op->b)};
	here.at = here.source < 0 ? -1 : mask_layer(tree, op->a);
	const char *part = op->s[0] + strlen(op->s[1]) + 1;
	int result = here.at < 0 ? -1 : 1;
	while (result == 1) {
		struct level next = {-1, -1};
		int made = 0;
		size_t length = strcspn(part, "/");
		memcpy(name, part, length);
		name[length] = '\0';
		result = descend(here, name, part[length] == '\0', &next, &made);
		/* After its content, because a new name changes the times. */
		if (result >= 0 && made && copy_attributes(here.at, here.source))
			result = -1;
		close_level(&here);
		here = next;
		part += length + 1;
	}
	close_level(&here);
	return result;
}
