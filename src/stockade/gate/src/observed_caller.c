/* What an observer learns from the caller: its memory, its directories, its umask. */
#define _GNU_SOURCE
#include "observer.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>

enum { MOST_CHANGES = 32, PAGE = 4096 };

/* Whether the call still waits: then the process that was looked at is the one that made it. */
int still_waits(const struct seccomp_notif *call)
{
	uint64_t id = call->id;
	return ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

ssize_t read_memory(pid_t pid, uint64_t from, void *into, size_t size)
{
	struct iovec local = {into, size}, remote = {(void *)(uintptr_t)from, size};
	return process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

/* 0, or -1 with errno set. The next page may not be there. */
int read_path(pid_t pid, uint64_t from, char path[PATH_MAX])
{
	for (size_t got = 0; got < PATH_MAX;) {
		size_t size = PAGE - (from + got) % PAGE;
		if (size > PATH_MAX - got)
			size = PATH_MAX - got;
		ssize_t count = read_memory(pid, from + got, path + got, size);
		if (count < 0)
			return -1;
		if (memchr(path + got, '\0', (size_t)count))
			return 0;
		if ((size_t)count < size) {
			errno = EFAULT;
			return -1;
		}
		got += size;
	}
	errno = ENAMETOOLONG;
	return -1;
}

/* What the observer knows of a caller that makes several calls in a row: its working directory, and that the
 * observer's own umask is the caller's. Calls that change either notify. Then the observer forgets what it knows, and
 * keeps nothing while such a call may be under way anywhere: until the process that made it makes another. The number of
 * a process is not another's while its descriptor does not say that it has ended. */
static struct {
	pid_t pid, last;
	int process, directory, masked;
	int met; /* whether this call has asked for it already */
	pid_t changing[MOST_CHANGES];
	unsigned changes;
	int never;
} caller = {.process = -1, .directory = -1};

static void forget_caller(void)
{
	close_fd(&caller.process);
	close_fd(&caller.directory);
	caller.pid = 0;
	caller.masked = 0;
}

static int has_ended(pid_t pid)
{
	return syscall(SYS_faccessat2, observer.proc, own_name(pid), F_OK, 0) != 0;
}

/* Changes that are over: of a process that makes another call; with `pid` 0 of those that have ended. */
static void end_changes(pid_t pid)
{
	for (unsigned i = caller.changes; i-- > 0;)
		if (pid ? caller.changing[i] == pid : has_ended(caller.changing[i]))
			caller.changing[i] = caller.changing[--caller.changes];
}

/* A call of this process changes what is known of it, or of a process that shares it. */
void caller_changes(pid_t pid)
{
	forget_caller();
	if (caller.changes == MOST_CHANGES)
		end_changes(0);
	if (caller.changes == MOST_CHANGES)
		caller.never = 1;
	else
		caller.changing[caller.changes++] = pid;
}

void caller_calls(pid_t pid)
{
	caller.met = 0;
	end_changes(pid);
}

/* Whether something may be kept of it. Decided once for each call: until its end, what is known stays open. */
static int is_known(pid_t pid)
{
	struct pollfd ended = {caller.process, POLLIN, 0};
	if (caller.met)
		return caller.pid == pid;
	caller.met = 1;
	if (caller.pid == pid && poll(&ended, 1, 0) == 0)
		return 1;
	forget_caller();
	int again = caller.last == pid;
	caller.last = pid;
	if (!again || caller.never)
		return 0;
	end_changes(0);
	if (caller.changes)
		return 0;
	caller.process = sys_pidfd_open(pid); /* none of a thread that does not lead its process */
	caller.pid = caller.process < 0 ? 0 : pid;
	return caller.pid == pid;
}

/* A thread that does not lead its process takes over the leader's number when it executes, and may have a directory and a
 * umask of its own. */
void caller_executes(pid_t pid)
{
	owned_fd process = sys_pidfd_open(pid);
	forget_caller();
	caller.never |= process < 0;
}

/* Where a path of the caller begins. `always`: also if it is absolute. */
void open_directory(pid_t pid, int dirfd, int always, struct place *place)
{
	if (place->path[0] == '/' && !always) {
		place->dir = AT_FDCWD;
		return;
	}
	place->borrowed = dirfd == AT_FDCWD && is_known(pid);
	if (place->borrowed && caller.directory >= 0) {
		place->dir = caller.directory;
		return;
	}
	if (dirfd >= 0 && is_known(pid)) {
		place->dir = (int)syscall(SYS_pidfd_getfd, caller.process, dirfd, 0);
		return;
	}
	const char *name = dirfd == AT_FDCWD ? proc_name(pid, "cwd", -1) : proc_name(pid, "fd", dirfd < 0 ? INT_MAX : dirfd);
	place->dir = openat(observer.proc, name, O_PATH | O_CLOEXEC);
	if (place->borrowed)
		caller.directory = place->dir;
}

void close_place(struct place *place)
{
	if (place->dir >= 0 && !place->borrowed)
		close_fd(&place->dir);
	place->dir = -1;
}
/* Reads a path of the caller, and where it begins. Answers the call itself if that is impossible, and returns -1.
 * Before anything is changed or written down, `still_waits` has to say that this was the caller. */
int find(const struct seccomp_notif *call, int dirfd, uint64_t address, int always, struct place *place)
{
	pid_t pid = (pid_t)call->pid;
	if (read_path(pid, address, place->path)) {
		if (errno == EFAULT || errno == ENAMETOOLONG)
			go_on(call); /* the kernel says the same */
		else
			count_unread(call);
		return -1;
	}
	open_directory(pid, dirfd, always, place);
	if (place->dir == -1) {
		go_on(call);
		return -1;
	}
	return 0;
}

/* The caller's, for what is made in its place. */
int take_umask(pid_t pid)
{
	char text[256];
	unsigned mask;
	if (is_known(pid) && caller.masked)
		return 0;
	owned_fd status = openat(observer.proc, proc_name(pid, "status", -1), O_RDONLY | O_CLOEXEC);
	ssize_t got = status < 0 ? -1 : read(status, text, sizeof text - 1);
	if (got <= 0)
		return -1;
	text[got] = '\0';
	const char *line = strstr(text, "\nUmask:\t"); /* a newline in the name of the process is escaped */
	if (line == NULL || sscanf(line, "\nUmask:\t%o", &mask) != 1)
		return -1;
	umask(mask);
	caller.masked = caller.pid == pid;
	return 0;
}
