/* Opening files in the place of a program. */
#define _GNU_SOURCE
#include "observer.h"

#include <linux/magic.h>
#include <sys/vfs.h>

char paths[2][PATH_MAX];

int look_up(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = resolve | RESOLVE_NO_MAGICLINKS};
	return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

/* In /proc a name means something else to each process; and what is in it of the observer must never reach a program. */
int is_in_proc(int fd)
{
	struct statfs info;
	return fstatfs(fd, &info) || info.f_type == PROC_SUPER_MAGIC;
}

/* The same of a file whose device is known, without a call where the sandbox's own /proc is the only one. */
static int is_of_proc(int fd, const struct stat *info)
{
	return observer.only_proc ? info->st_dev == observer.only_proc : is_in_proc(fd);
}

/* After a failure: whether the path leads through /proc or a link, so that the program may find something there that
 * the observer does not. Goes up to what exists. */
int may_differ(const struct place *place, int *links)
{
	static char above[PATH_MAX];
	size_t length = strlen(place->path);
	memcpy(above, place->path, length + 1);
	*links = 0;
	for (;;) {
		while (length > 1 && above[length - 1] == '/')
			above[--length] = '\0';
		owned_fd found = look_up(place->dir, length ? above : ".", O_PATH | O_NOFOLLOW, 0, 0);
		struct stat info;
		if (found >= 0) {
			if (fstat(found, &info) == 0 && S_ISLNK(info.st_mode))
				*links = 1;
			return is_in_proc(found) || *links;
		}
		if (errno == ELOOP)
			return 1;
		while (length && above[length - 1] != '/')
			above[--length] = '\0';
		if (length == 0)
			return place->dir >= 0 && is_in_proc(place->dir);
	}
}

/* The observer got this error in the program's place. */
static void fail(const struct seccomp_notif *call, enum observed_action action, int error, const struct place *place,
		 const struct place *other)
{
	int links = 0;
	if (!still_waits(call))
		return;
	int differs = error == ELOOP || may_differ(place, &links) || (other && may_differ(other, &links));
	if (!differs || links)
		observe((pid_t)call->pid, action, error, place, other);
	if (differs || !observer.performs)
		go_on(call);
	else
		answer(call, error, 0);
}

static enum observed_action action_of(uint64_t flags)
{
	if (flags & O_PATH)
		return OBSERVED_READ;
	if ((flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC)
		return OBSERVED_WRITE;
	return OBSERVED_READ;
}

/* Opens what was looked up once more, with the flags of the caller: no name is resolved a second time. With O_TMPFILE,
 * O_EXCL says that the file never gets a name. */
static int open_again(int found, uint64_t flags, uint64_t mode)
{
	uint64_t without = O_CREAT | O_NOFOLLOW | ((flags & O_TMPFILE) == O_TMPFILE ? 0 : O_EXCL);
	return openat(observer.own, own_name(found), (int)(flags & ~without) | O_NOCTTY | O_CLOEXEC, (mode_t)mode);
}

static void open_found(const struct seccomp_notif *call, const struct place *place, int found, uint64_t flags,
		       uint64_t mode)
{
	pid_t pid = (pid_t)call->pid;
	struct stat info;
	int makes = (flags & O_TMPFILE) == O_TMPFILE;
	enum observed_action action = makes ? OBSERVED_CREATE : action_of(flags);
	if (fstat(found, &info) || is_in_proc(found)) {
		go_on(call);
		return;
	}
	/* A device or a pipe may block, or be another one to the program; a link is refused by the kernel. So is a
	 * directory that is to be made. A descriptor that only names a file cannot be handed over. */
	if (flags & O_PATH || (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) || (S_ISDIR(info.st_mode) && flags & O_CREAT) ||
	    (makes && take_umask(pid))) {
		observe(pid, action, 0, place, NULL);
		go_on(call);
		return;
	}
	if (!observer.performs)
		flags &= ~(uint64_t)O_TRUNC;
	owned_fd opened = makes && !observer.performs ? -1 : open_again(found, flags, mode);
	int error = opened < 0 ? errno : 0;
	if (!observer.performs) {
		observe(pid, action, makes ? 0 : error, place, NULL);
		go_on(call);
	} else if (opened < 0) {
		observe(pid, action, error, place, NULL);
		answer(call, error, 0);
	} else {
		observe(pid, action, 0, place, NULL);
		hand_over(call, opened, (flags & O_CLOEXEC) != 0);
	}
}

/* Whether the caller's directory takes a new name; where the observer does nothing in its place. */
int predict_change(const struct place *place)
{
	static char above[PATH_MAX];
	size_t length = strlen(place->path);
	memcpy(above, place->path, length + 1);
	while (length > 1 && above[length - 1] == '/')
		above[--length] = '\0';
	while (length && above[length - 1] != '/')
		above[--length] = '\0';
	owned_fd parent = look_up(place->dir, length ? above : ".", O_PATH | O_DIRECTORY, 0, 0);
	if (parent < 0)
		return errno;
	return syscall(SYS_faccessat2, parent, "", W_OK | X_OK, AT_EMPTY_PATH | AT_EACCESS) ? errno : 0;
}

static void make_file(const struct seccomp_notif *call, const struct place *place, uint64_t flags, uint64_t mode,
		      uint64_t resolve)
{
	pid_t pid = (pid_t)call->pid;
	struct stat info;
	if (!observer.performs || take_umask(pid)) {
		observe(pid, OBSERVED_CREATE, predict_change(place), place, NULL);
		go_on(call);
		return;
	}
	/* Another process may put a pipe there meanwhile: the observer must not wait for its other end. */
	owned_fd made = look_up(place->dir, place->path, flags | O_NONBLOCK | O_NOCTTY, mode, resolve);
	if (made < 0) {
		fail(call, OBSERVED_CREATE, errno, place, NULL);
		return;
	}
	if (fstat(made, &info) || !S_ISREG(info.st_mode) || is_in_proc(made) ||
	    (!(flags & O_NONBLOCK) && fcntl(made, F_SETFL, fcntl(made, F_GETFL) & ~O_NONBLOCK))) {
		go_on(call);
		return;
	}
	observe(pid, OBSERVED_CREATE, 0, place, NULL);
	hand_over(call, made, (flags & O_CLOEXEC) != 0);
}

/* The common case, in as few calls as possible. A first look finds what may block or have an effect when it is opened.
 * Another process can put a pipe there after it, so that the observer does not wait for its other end even then. */
static void open_existing(const struct seccomp_notif *call, const struct place *place, uint64_t flags)
{
	pid_t pid = (pid_t)call->pid;
	struct stat info;
	if (fstatat(place->dir, place->path, &info, flags & O_NOFOLLOW ? AT_SYMLINK_NOFOLLOW : 0)) {
		fail(call, action_of(flags), errno, place, NULL);
		return;
	}
	if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
		observe(pid, action_of(flags), 0, place, NULL);
		go_on(call);
		return;
	}
	if (flags & O_TRUNC && !still_waits(call))
		return;
	owned_fd opened = look_up(place->dir, place->path, flags | O_NONBLOCK | O_NOCTTY, 0, 0);
	if (opened < 0) {
		fail(call, action_of(flags), errno, place, NULL);
		return;
	}
	if (fstat(opened, &info) || (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) || is_of_proc(opened, &info) ||
	    (!(flags & O_NONBLOCK) && fcntl(opened, F_SETFL, (int)(flags & (O_APPEND | O_ASYNC | O_DIRECT | O_NOATIME))))) {
		go_on(call);
		return;
	}
	observe(pid, action_of(flags), 0, place, NULL);
	hand_over(call, opened, (flags & O_CLOEXEC) != 0);
}

void open_file(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags, uint64_t mode,
		      uint64_t resolve)
{
	owned_place place = {-1, paths[0], 0};
	if (find(call, dirfd, address, (resolve & (RESOLVE_BENEATH | RESOLVE_IN_ROOT)) != 0, &place))
		return;
	if (!(flags & (O_CREAT | O_PATH | (O_TMPFILE & ~O_DIRECTORY))) && resolve == 0 && observer.performs) {
		open_existing(call, &place, flags);
		return;
	}
	if (!still_waits(call))
		return;
	int excludes = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL) && (flags & O_TMPFILE) != O_TMPFILE;
	if (excludes) {
		make_file(call, &place, flags, mode, resolve);
		return;
	}
	uint64_t looks = O_PATH | (flags & (O_DIRECTORY | O_NOFOLLOW));
	owned_fd found = look_up(place.dir, place.path, looks, 0, resolve);
	if (found >= 0)
		open_found(call, &place, found, flags, mode);
	else if (errno == ENOENT && flags & O_CREAT)
		make_file(call, &place, flags, mode, resolve);
	else
		fail(call, action_of(flags), errno, &place, NULL);
}

void open_by_structure(const struct seccomp_notif *call)
{
	const uint64_t *args = (const uint64_t *)call->data.args;
	struct open_how how;
	if (args[3] != sizeof how) {
		go_on(call);
		return;
	}
	ssize_t got = read_memory((pid_t)call->pid, args[2], &how, sizeof how);
	if (got < 0 && errno != EFAULT) {
		count_unread(call);
		return;
	}
	/* What the kernel refuses anyway: it says how. */
	if (got != sizeof how || how.flags & ~(uint64_t)KNOWN_FLAGS || how.mode & ~(uint64_t)07777 || how.resolve & ~(uint64_t)0x3f ||
	    (how.mode && !(how.flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))))) {
		go_on(call);
		return;
	}
	open_file(call, (int)args[0], args[1], how.flags, how.mode, how.resolve);
}
