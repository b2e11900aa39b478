/* A second look, before any untrusted code: is what the plan asked for really there?
 *
 * Mounts, namespaces, capabilities, id maps and the filter's presence are read by the supervisor
 * from the kernel; here is what only a process inside can see.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <sys/wait.h>

/* Of a directory, when it is compared. */
enum { MOST_NAMES = 1000 };

static int missing(void)
{
	errno = ENODATA;
	return -1;
}

static int confirm_file(int root, const struct op *op)
{
	struct stat info;
	char target[PATH_MAX];
	if (fstatat(root, op->s[0] + 1, &info, AT_SYMLINK_NOFOLLOW))
		return missing();
	mode_t mode = info.st_mode & 07777;
	switch (op->type) {
	case OP_DIR:
	case OP_SCRATCH:
		return S_ISDIR(info.st_mode) && mode == op->a ? 0 : missing();
	case OP_LINK: {
		ssize_t length = readlinkat(root, op->s[0] + 1, target, sizeof target);
		if (length < 0)
			return missing();
		return (size_t)length == strlen(op->s[1]) && memcmp(target, op->s[1], (size_t)length) == 0 ? 0 : missing();
	}
	case OP_FILE:
		return S_ISREG(info.st_mode) && mode == op->a && (uint64_t)info.st_size == op->b ? 0 : missing();
	default: /* the supervisor sees the mount itself */
		return 0;
	}
}

static int confirm_size(int root, const struct op *op)
{
	struct statfs info;
	if (op->a == 0)
		return 0;
	if (fstatfs(root, &info))
		return -1;
	uint64_t page = (uint64_t)info.f_bsize, pages = op->a / page + (op->a % page != 0);
	return info.f_blocks == pages && info.f_files == op->b ? 0 : missing();
}

/* That /tmp and the others are on it, the supervisor sees in the mount table. */
static int confirm_image(const struct tree *tree, const struct op *op)
{
	struct statfs info;
	if (tree->image < 0)
		return missing();
	if (fstatfs(tree->image, &info))
		return -1;
	return (uint64_t)info.f_blocks * (uint64_t)info.f_bsize <= op->a ? 0 : missing();
}

int confirm_tree(const struct tree *tree, const struct op *op, const char **culprit)
{
	struct stat info;
	*culprit = op->s[0];
	switch (op->type) {
	case OP_DIR:
	case OP_FILE:
	case OP_LINK:
	case OP_SCRATCH:
		return confirm_file(tree->root, op);
	case OP_ROOT:
		return confirm_size(tree->root, op);
	case OP_IMAGE:
		return confirm_image(tree, op);
	case OP_MASK:
		/* By its name from the root: no mount made since may show it again. */
		if (fstatat(tree->root, op->s[0] + 1, &info, AT_SYMLINK_NOFOLLOW) == 0)
			return missing();
		return errno == ENOENT ? 0 : -1;
	}
	return 0;
}

/* The sets themselves the supervisor reads. */
static int confirm_kept(uint64_t keep)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[2];
	if (keep == 0)
		return 0;
	if (syscall(SYS_capget, &header, sets))
		return -1;
	if (sets[0].permitted != keep || sets[0].effective != keep || sets[0].inheritable ||
	    sets[1].permitted || sets[1].effective || sets[1].inheritable)
		return missing();
	if (getuid() || getgid() || (unsigned long)prctl(PR_GET_SECUREBITS, 0, 0, 0, 0) != securebits(keep))
		return missing();
	for (unsigned long cap = 0;; cap++) {
		int bounded = prctl(PR_CAPBSET_READ, cap, 0, 0, 0);
		if (bounded < 0)
			return errno == EINVAL ? 0 : -1;
		if ((uint64_t)bounded != (cap < 64 ? keep >> cap & 1 : 0))
			return missing();
	}
}

int confirm_op(const struct walls *walls, const struct op *op, const char **culprit)
{
	struct utsname name;
	struct rlimit limit;
	*culprit = op->s[0];
	switch (op->type) {
	case OP_HOSTNAME:
		return uname(&name) == 0 && strcmp(name.nodename, op->s[0]) == 0 ? 0 : missing();
	case OP_RLIMIT:
		if (getrlimit((int)op->a, &limit))
			return -1;
		return limit.rlim_max == op->b + (op->a == RLIMIT_NPROC ? GRACE_TASKS : 0) ? 0 : missing();
	case OP_KEYRING:
		if (walls->helped)
			return 0; /* the usher has seen to it; here the filter refuses to tell */
		return session_keyring() != walls->keyring ? 0 : missing();
	case OP_PRIVILEGES:
		*culprit = "capabilities";
		if (prctl(PR_GET_DUMPABLE) || prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1)
			return missing();
		return confirm_kept(op->a);
	}
	return 0;
}

/* A socket by an abstract name that is older than the wall must be out of reach. */
static int confirm_scopes(const struct walls *walls)
{
	struct sockaddr_un name;
	socklen_t length = sizeof name;
	if (getsockname(walls->outsider, (struct sockaddr *)&name, &length))
		return -1;
	owned_fd caller = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (caller < 0)
		return -1;
	if (connect(caller, (struct sockaddr *)&name, length) == 0)
		return missing();
	return errno == EPERM ? 0 : -1;
}

/* Of a plan without namespaces: a system's tree, the first that is granted. */
static const char *granted_directory(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_GRANT)
			return plan->ops[i].s[0];
	return "/";
}

/* No host has this address, so that whatever Landlock lets pass goes nowhere: a connection to a group of hosts
 * ends with ENETUNREACH before a packet is sent. */
static int try_port(uint16_t port, int binds)
{
	struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port)};
	place.sin_addr.s_addr = htonl(binds ? INADDR_LOOPBACK : INADDR_ALLHOSTS_GROUP);
	owned_fd caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (caller < 0)
		return -1;
	return binds ? bind(caller, (struct sockaddr *)&place, sizeof place)
		     : connect(caller, (struct sockaddr *)&place, sizeof place);
}

static int is_granted(const struct plan *plan, uint64_t port)
{
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_PORT && plan->ops[i].b == port && (plan->ops[i].a & NET_CONNECT))
			return 1;
	return 0;
}

/* Where ports are handled, one that was not granted must be refused, and every one that was must not be. */
static int confirm_ports(const struct walls *walls, const struct plan *plan)
{
	uint64_t handled = 0;
	uint16_t other = 1;
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_LANDLOCK)
			handled = plan->ops[i].b;
	/* As for the scopes: a process that has confined itself before can make no socket any more. */
	if ((handled & (NET_BIND | NET_CONNECT)) && walls->itself && try_port(0, 1) && errno == EAFNOSUPPORT)
		return 0;
	if ((handled & NET_BIND) && (try_port(0, 1) == 0 || errno != EACCES))
		return missing();
	if (!(handled & NET_CONNECT))
		return 0;
	while (other && is_granted(plan, other))
		other++;
	if (other && (try_port(other, 0) == 0 || errno != EACCES))
		return missing();
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_PORT && (plan->ops[i].a & NET_CONNECT) &&
		    (try_port((uint16_t)plan->ops[i].b, 0) == 0 || errno == EACCES))
			return missing();
	return 0;
}

/* A file without a name, by the sandbox's own /proc; where the plan has none, a file that the plan makes. */
static void canary_path(const struct walls *walls, const struct plan *plan, int canary, char *path, size_t size)
{
	const char *file = NULL;
	int proc = 0;
	for (unsigned i = plan->base + 1; i < plan->count; i++) {
		proc |= plan->ops[i].type == OP_PROC;
		if (plan->ops[i].type == OP_FILE)
			file = plan->ops[i].s[0];
	}
	if (walls->warden)
		snprintf(path, size, "/");
	else if (file && !proc)
		snprintf(path, size, "%s", file);
	else
		snprintf(path, size, "/proc/self/fd/%d", canary);
}

/* Landlock keeps signals inside since ABI 6. */
static int is_scoped(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_LANDLOCK)
			return plan->ops[i].b >> 32 != 0;
	return 0;
}

/* Landlock cannot be read from outside, so it is tried: a file that exists but was not granted
 * must be refused, a directory that was granted must open. */
int confirm_walls(const struct walls *walls, const struct plan *plan, int canary, const char **culprit)
{
	unsigned granted = 0;
	for (unsigned i = 0; i < plan->count; i++)
		granted += plan->ops[i].type == OP_GRANT || plan->ops[i].type == OP_PORT;
	*culprit = "Landlock rules";
	if (granted != walls->rules)
		return missing();
	char path[PATH_MAX];
	canary_path(walls, plan, canary, path, sizeof path);
	*culprit = "a file that Landlock must refuse";
	owned_fd refused = open(path, O_RDONLY | O_CLOEXEC);
	if (refused >= 0)
		return missing();
	if (errno != EACCES)
		return -1;
	*culprit = "a directory that Landlock must allow";
	owned_fd allowed = open(walls->warden ? granted_directory(plan) : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (allowed < 0)
		return -1;
	*culprit = "a socket that Landlock must refuse";
	if (walls->outsider >= 0 && confirm_scopes(walls))
		return -1;
	*culprit = "a port that Landlock must refuse";
	if (confirm_ports(walls, plan))
		return -1;
	*culprit = "a signal that Landlock must refuse";
	return walls->warden && is_scoped(plan) ? confirm_signal_scope(walls->warden) : 0;
}

/* Behind the wall that only programs have, /proc and init itself are out of reach. */
static int try_inner(const struct walls *walls, pid_t gate)
{
	if (wall_inner(walls->inner))
		return -1;
	int refused = sys_open("/proc", O_RDONLY | O_DIRECTORY);
	if (refused >= 0 || errno != EACCES)
		return missing();
	return confirm_signal_scope(gate);
}

int confirm_inner(const struct walls *walls)
{
	int status;
	if (!walls->warden)
		return 0;
	if (walls->inner < 0)
		return missing();
	pid_t gate = getpid(), pid = fork();
	if (pid == 0)
		_exit(try_inner(walls, gate) ? 1 : 0);
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -1;
	return status ? missing() : 0;
}

static void close_listing(DIR **names)
{
	int error = errno;
	if (*names)
		closedir(*names);
	errno = error;
}
#define owned_listing __attribute__((cleanup(close_listing))) DIR *

static DIR *listing(int directory)
{
	char path[32];
	snprintf(path, sizeof path, "/proc/self/fd/%d", directory);
	owned_fd file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *found = file < 0 ? NULL : fdopendir(file);
	if (found)
		take_fd(&file);
	return found;
}

static int has_name(int directory, const char *name)
{
	struct stat info;
	return directory >= 0 && fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

/* The kernel sets the time of the last change of an inode, and no program can. */
static int is_same_inode(const struct stat *one, const struct stat *other)
{
	return one->st_mode == other->st_mode && one->st_ctim.tv_sec == other->st_ctim.tv_sec &&
	       one->st_ctim.tv_nsec == other->st_ctim.tv_nsec;
}

/* Whether a name of the host's directory is what an overlay over it shows. */
static int shows_name(int overlay, int lower, const char *name)
{
	struct stat before, seen, after;
	for (unsigned tries = 0; tries < 100; tries++) {
		if (fstatat(lower, name, &before, AT_SYMLINK_NOFOLLOW))
			return errno == ENOENT && !has_name(overlay, name);
		if (S_ISCHR(before.st_mode) && before.st_rdev == 0)
			return !has_name(overlay, name); /* a whiteout */
		int found = fstatat(overlay, name, &seen, AT_SYMLINK_NOFOLLOW) == 0;
		if (found && is_same_inode(&before, &seen))
			return 1;
		if (fstatat(lower, name, &after, AT_SYMLINK_NOFOLLOW) == 0 && is_same_inode(&before, &after))
			return 0; /* it did not change meanwhile */
	}
	return 0;
}

/* Every name in one of them, as far as the changes above do not say otherwise. */
static int compare(DIR *names, int overlay, int lower, int upper)
{
	unsigned looked_at = 0;
	for (struct dirent *entry; (entry = readdir(names)) && looked_at < MOST_NAMES; looked_at++)
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && !has_name(upper, entry->d_name) &&
		    !shows_name(overlay, lower, entry->d_name))
			return -1;
	return 0;
}

int confirm_bound(const char *path, int source)
{
	struct stat judged, bound;
	if (fstat(source, &judged) || fstatat(AT_FDCWD, path, &bound, AT_SYMLINK_NOFOLLOW))
		return -1;
	errno = ESTALE;
	return judged.st_dev == bound.st_dev && judged.st_ino == bound.st_ino ? 0 : -1;
}

int confirm_shown(const char *path, int lower, int upper)
{
	owned_fd overlay = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (overlay < 0)
		return -1;
	owned_listing below = listing(lower);
	owned_listing shown = below ? listing(overlay) : NULL;
	if (shown == NULL)
		return -1;
	int differs = compare(below, overlay, lower, upper) || compare(shown, overlay, lower, upper);
	errno = ESTALE;
	return differs ? -1 : 0;
}

int confirm_seccomp(void)
{
	if (session_keyring() >= 0 || errno != EPERM)
		return missing();
	/* In a container that one is refused already. */
	return syscall(SYS_adjtimex, NULL) < 0 && errno == EPERM ? 0 : missing();
}
