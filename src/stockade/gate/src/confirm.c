/* A second look, before any untrusted code: is what the plan asked for really there?
 *
 * Mounts, namespaces, capabilities, id maps and the filter's presence are read by the supervisor
 * from the kernel; here is what only a process inside can see.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
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

static int missing(void)
{
	errno = ENODATA;
	return -1;
}

static int confirm_file(int root, const struct op *op)
{
	struct stat info;
	if (fstatat(root, op->s[0] + 1, &info, AT_SYMLINK_NOFOLLOW))
		return missing();
	switch (op->type) {
	case OP_DIR:
		return S_ISDIR(info.st_mode) ? 0 : missing();
	case OP_LINK:
		return S_ISLNK(info.st_mode) ? 0 : missing();
	case OP_FILE:
		return S_ISREG(info.st_mode) && (uint64_t)info.st_size == op->b ? 0 : missing();
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
static int confirm_image(const struct box *box, const struct op *op)
{
	struct statfs info;
	if (box->image < 0)
		return missing();
	if (fstatfs(box->image, &info))
		return -1;
	return (uint64_t)info.f_blocks * (uint64_t)info.f_bsize <= op->a ? 0 : missing();
}

int confirm_op(const struct box *box, const struct op *op, const char **culprit)
{
	struct utsname name;
	struct rlimit limit;
	struct stat info;
	*culprit = op->s[0];
	switch (op->type) {
	case OP_HOSTNAME:
		return uname(&name) == 0 && strcmp(name.nodename, op->s[0]) == 0 ? 0 : missing();
	case OP_DIR:
	case OP_FILE:
	case OP_LINK:
		return confirm_file(box->root, op);
	case OP_ROOT:
		return confirm_size(box->root, op);
	case OP_IMAGE:
		return confirm_image(box, op);
	case OP_MASK:
		/* By its name from the root: no mount made since may show it again. */
		if (fstatat(box->root, op->s[0] + 1, &info, AT_SYMLINK_NOFOLLOW) == 0)
			return missing();
		return errno == ENOENT ? 0 : -1;
	case OP_RLIMIT:
		if (getrlimit((int)op->a, &limit))
			return -1;
		return limit.rlim_max == op->b + (op->a == RLIMIT_NPROC ? GRACE_TASKS : 0) ? 0 : missing();
	case OP_KEYRING:
		return session_keyring() != box->keyring ? 0 : missing();
	case OP_PRIVILEGES:
		return prctl(PR_GET_DUMPABLE) == 0 && prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 ? 0
												   : missing();
	}
	return 0;
}

/* A socket by an abstract name that is older than the wall must be out of reach. */
static int confirm_scopes(const struct box *box)
{
	struct sockaddr_un name;
	socklen_t length = sizeof name;
	if (getsockname(box->outsider, (struct sockaddr *)&name, &length))
		return -1;
	int caller = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (caller < 0)
		return -1;
	int reached = connect(caller, (struct sockaddr *)&name, length) == 0;
	int error = errno;
	close(caller);
	errno = error;
	return reached ? missing() : errno == EPERM ? 0 : -1;
}

/* Of a plan without namespaces: a system's tree, the first that is granted. */
static const char *granted_directory(const struct box *box)
{
	for (unsigned i = 0; i < box->plan.count; i++)
		if (box->plan.ops[i].type == OP_GRANT)
			return box->plan.ops[i].s[0];
	return "/";
}

/* Landlock cannot be read from outside, so it is tried: a file that exists but was not granted
 * must be refused, a directory that was granted must open. */
int confirm_walls(const struct box *box, const char **culprit)
{
	unsigned granted = 0;
	for (unsigned i = 0; i < box->plan.count; i++)
		granted += box->plan.ops[i].type == OP_GRANT;
	*culprit = "Landlock rules";
	if (granted != box->rules)
		return missing();
	char path[32] = "/";
	if (!box->warden)
		snprintf(path, sizeof path, "/proc/self/fd/%d", box->canary);
	*culprit = "a file that Landlock must refuse";
	int refused = open(path, O_RDONLY | O_CLOEXEC);
	if (refused >= 0) {
		close(refused);
		return missing();
	}
	if (errno != EACCES)
		return -1;
	*culprit = "a directory that Landlock must allow";
	int allowed = open(box->warden ? granted_directory(box) : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (allowed < 0)
		return -1;
	close(allowed);
	*culprit = "a socket that Landlock must refuse";
	if (box->outsider >= 0 && confirm_scopes(box))
		return -1;
	*culprit = "a signal that Landlock must refuse";
	return box->warden ? signals_stay_in(box->warden) : 0;
}

/* Behind the wall that programs have besides, /proc and the gate itself are out of reach. */
static int try_inner(const struct box *box, pid_t gate)
{
	if (wall_inner(box->inner))
		return -1;
	int refused = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (refused >= 0 || errno != EACCES)
		return missing();
	return signals_stay_in(gate);
}

int confirm_inner(const struct box *box)
{
	int status;
	if (!box->warden)
		return 0;
	if (box->inner < 0)
		return missing();
	pid_t gate = getpid(), pid = fork();
	if (pid == 0)
		_exit(try_inner(box, gate) ? 1 : 0);
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -1;
	return status ? missing() : 0;
}

int confirm_seccomp(void)
{
	if (session_keyring() >= 0 || errno != EPERM)
		return missing();
	/* In a container that one is refused already. */
	return syscall(SYS_adjtimex, NULL) < 0 && errno == EPERM ? 0 : missing();
}
