/* The observer: sees what programs open, make, remove, rename, execute and connect to, and what the filter refuses.
 *
 * It is a thread of init, in an observed sandbox only. Programs can neither signal nor stop the first process, nor read
 * its memory, so nothing inside can blind or hang the observer; if it fails, init ends, and the sandbox with it. It was
 * born behind the same walls as every program, before the filter that notifies it was loaded, and lives behind a
 * smaller filter of its own, with its own descriptors, working directory and umask. It has no capability.
 *
 * What the ordinary filter would refuse, the observer refuses with the same error number: it evaluates that filter for
 * each call and never lets such a call go on. What the filter allows, the kernel's other walls decide:
 *
 *   - Files and directories: the observer reads the path once, opens it itself and puts the descriptor into the
 *     program, so what it wrote down is what the program has, also if a thread rewrites the path meanwhile. Making,
 *     removing and renaming names, likewise: the observer does it, relative to directories that it has opened.
 *   - Everything whose meaning depends on who opens it, or that may block, goes on in the program itself, and the
 *     kernel decides there: /proc, devices, pipes, terminals, links into /proc, and opening with O_PATH. Executing and
 *     connecting do too; the observer only tries what would become of them.
 *   - If a descriptor cannot be put into the program, the call fails. If the observer cannot read a program's
 *     memory (it is not dumpable, or another user's), the call goes on unobserved, and is counted.
 *
 * A program that confines itself further with Landlock has less than the observer. From the first such call on, the
 * observer opens nothing for programs any more: it looks, and lets the calls go on.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5) /* Linux 5.19 */
#endif
#ifndef SECCOMP_IOCTL_NOTIF_SET_FLAGS
#define SECCOMP_IOCTL_NOTIF_SET_FLAGS SECCOMP_IOW(4, __u64) /* Linux 6.6 */
#define SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP 1UL
#endif
#ifndef SECCOMP_ADDFD_FLAG_SEND
#define SECCOMP_ADDFD_FLAG_SEND (1UL << 1)
#endif

enum { STACK_SIZE = 512 << 10, SLOTS = 1 << 17, LONGEST = 2 * PATH_MAX, PAGE = 4096 };

/* The rest of the path that a program gave, seen from a directory that the observer holds. */
struct place {
	int dir;      /* where a relative path begins, or AT_FDCWD */
	char *path;   /* as the program wrote it */
	int borrowed; /* what is kept of the caller */
};

static struct {
	const struct sock_filter *filter; /* the ordinary one, which says what is refused */
	size_t filter_length;
	int everything; /* whether what succeeds is written down as well */
	int performs;   /* whether the observer opens, makes and removes for programs */
	int listener, proc, own; /* `own`: the directory of this thread's descriptors in /proc */
	pid_t init;
	dev_t only_proc; /* the device of /proc, if no other process file system can be seen */
	struct observations *memory;
	unsigned taken;
	sem_t handed, ready;
	int alone; /* the plan mounts one process file system, over a root of its own */
	int started, problem;
	const char *what; /* failed */
} observer = {.listener = -1, .proc = -1, .own = -1};

static uint32_t slots[SLOTS]; /* places of records, by hash; 0: free */
static char paths[2][PATH_MAX], texts[2][LONGEST];

/* --- what is written down --- */

static uint64_t hash(uint64_t sum, const void *bytes, size_t size)
{
	for (const unsigned char *at = bytes; size; at++, size--)
		sum = (sum ^ *at) * 0x100000001b3u;
	return sum;
}

static struct observation *record_at(uint32_t place)
{
	return (struct observation *)((char *)observer.memory + place);
}

static int is_same(uint32_t place, const struct observation *record, const char *target, const char *other)
{
	const struct observation *known = record_at(place);
	const char *text = (const char *)(known + 1);
	return known->action == record->action && known->error == record->error && known->program == record->program &&
	       known->call == record->call && known->target == record->target && known->other == record->other &&
	       memcmp(text, target, record->target) == 0 && memcmp(text + record->target, other, record->other) == 0;
}

/* The place of a record, which is counted if it is there already; 0 if there is no room. */
static uint32_t note(struct observation record, const char *target, const char *other)
{
	struct observations *memory = observer.memory;
	size_t first = strlen(target), second = strlen(other);
	record.target = (uint16_t)first;
	record.other = (uint16_t)second;
	record.size = (uint32_t)((sizeof record + first + second + 7) & ~(size_t)7);
	record.count = 1;
	uint64_t sum = hash(0xcbf29ce484222325u, &record, sizeof record);
	sum = hash(hash(sum, target, first), other, second);
	size_t slot = (sum ^ sum >> 32) % SLOTS;
	for (; slots[slot]; slot = (slot + 1) % SLOTS)
		if (is_same(slots[slot], &record, target, other)) {
			__atomic_add_fetch(&record_at(slots[slot])->count, 1, __ATOMIC_RELAXED);
			return slots[slot];
		}
	uint64_t used = memory->used;
	if (observer.taken >= SLOTS / 4 * 3 || used + record.size > OBSERVATIONS_SIZE - sizeof *memory) {
		__atomic_add_fetch(&memory->missed, 1, __ATOMIC_RELAXED);
		return 0;
	}
	uint32_t place = (uint32_t)(sizeof *memory + used);
	struct observation *fresh = record_at(place);
	*fresh = record;
	memcpy(fresh + 1, target, first);
	memcpy((char *)(fresh + 1) + first, other, second);
	slots[slot] = place;
	observer.taken++;
	__atomic_store_n(&memory->used, used + record.size, __ATOMIC_RELEASE);
	return place;
}

/* The name of something of a process in /proc. */
static const char *proc_name(pid_t pid, const char *what, int number)
{
	static char name[64];
	if (number < 0)
		snprintf(name, sizeof name, "%d/%s", pid, what);
	else
		snprintf(name, sizeof name, "%d/%s/%d", pid, what, number);
	return name;
}

static const char *own_name(int fd)
{
	static char name[16];
	snprintf(name, sizeof name, "%d", fd);
	return name;
}

/* The executable of the last process that was asked for, until any process executes another. */
static struct {
	pid_t pid;
	uint32_t program;
} executing;

/* The executable of a process, as a record of its own. */
static uint32_t program_of(pid_t pid)
{
	static char path[PATH_MAX];
	if (pid == executing.pid)
		return executing.program;
	ssize_t length = readlinkat(observer.proc, proc_name(pid, "exe", -1), path, sizeof path - 1);
	if (length <= 0)
		return 0;
	path[length] = '\0';
	executing.pid = pid;
	executing.program = note((struct observation){.action = OBSERVED_PROGRAM}, path, "");
	return executing.program;
}

/* The absolute path of a place. */
static const char *text_of(const struct place *place, char text[LONGEST])
{
	ssize_t length = 0;
	if (place->path[0] != '/' && place->dir >= 0) {
		length = readlinkat(observer.own, own_name(place->dir), text, PATH_MAX - 1);
		if (length < 0 || text[0] != '/')
			length = 0;
		if (length == 1)
			length = 0; /* the root */
		text[length++] = '/';
	}
	snprintf(text + length, LONGEST - (size_t)length, "%s", place->path);
	return text;
}

static void observe(pid_t pid, enum observed_action action, int error, const struct place *place,
		    const struct place *other)
{
	if (error == 0 && !observer.everything)
		return;
	struct observation record = {.action = action, .error = error, .program = error ? program_of(pid) : 0};
	note(record, text_of(place, texts[0]), other ? text_of(other, texts[1]) : "");
}

static void observe_text(pid_t pid, enum observed_action action, int error, const char *target)
{
	if (error || observer.everything)
		note((struct observation){.action = action, .error = error, .program = error ? program_of(pid) : 0}, target, "");
}

/* --- answers --- */

/* If the caller has died meanwhile, there is nobody to answer. */
static void answer(const struct seccomp_notif *call, int error, uint32_t flags)
{
	struct seccomp_notif_resp reply = {.id = call->id, .error = -error, .flags = flags};
	if (ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_SEND, &reply) && errno != ENOENT && errno != EINTR)
		_exit(1);
}

static void go_on(const struct seccomp_notif *call)
{
	answer(call, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE);
}

static void count_unread(const struct seccomp_notif *call)
{
	__atomic_add_fetch(&observer.memory->unread, 1, __ATOMIC_RELAXED);
	go_on(call);
}

/* The program gets the descriptor as the answer to its call; if it has no room for one, the call fails. */
static void hand_over(const struct seccomp_notif *call, int fd, int close_on_exec)
{
	struct seccomp_notif_addfd handed = {.id = call->id,
					     .flags = SECCOMP_ADDFD_FLAG_SEND,
					     .srcfd = (uint32_t)fd,
					     .newfd_flags = close_on_exec ? O_CLOEXEC : 0};
	if (ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_ADDFD, &handed) < 0 && errno != ENOENT)
		answer(call, errno == EINPROGRESS ? EIO : errno, 0);
}

/* What the ordinary filter would say: its program has six instructions. */
static uint32_t verdict_on(const struct seccomp_data *data)
{
	uint32_t loaded = 0;
	for (size_t at = 0; at < observer.filter_length; at++) {
		const struct sock_filter *line = &observer.filter[at];
		switch (line->code) {
		case BPF_LD | BPF_W | BPF_ABS:
			if (line->k > sizeof *data - sizeof loaded)
				return SECCOMP_RET_ERRNO | EPERM;
			memcpy(&loaded, (const char *)data + line->k, sizeof loaded);
			break;
		case BPF_JMP | BPF_JEQ | BPF_K:
			at += loaded == line->k ? line->jt : line->jf;
			break;
		case BPF_JMP | BPF_JGE | BPF_K:
			at += loaded >= line->k ? line->jt : line->jf;
			break;
		case BPF_JMP | BPF_JSET | BPF_K:
			at += loaded & line->k ? line->jt : line->jf;
			break;
		case BPF_JMP | BPF_JA:
			at += line->k;
			break;
		case BPF_RET | BPF_K:
			return line->k;
		default:
			return SECCOMP_RET_ERRNO | EPERM;
		}
	}
	return SECCOMP_RET_ERRNO | EPERM;
}

/* --- the caller's side --- */

/* Whether the call still waits: then the process that was looked at is the one that made it. */
static int still_waits(const struct seccomp_notif *call)
{
	uint64_t id = call->id;
	return ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

static ssize_t read_memory(pid_t pid, uint64_t from, void *into, size_t size)
{
	struct iovec local = {into, size}, remote = {(void *)(uintptr_t)from, size};
	return process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

/* 0, or -1 with errno set. The next page may not be there. */
static int read_path(pid_t pid, uint64_t from, char path[PATH_MAX])
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
	pid_t changing[32];
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

static void end_change(unsigned index)
{
	caller.changing[index] = caller.changing[--caller.changes];
}

/* A call of this process changes what is known of it, or of a process that shares it. */
static void caller_changes(pid_t pid)
{
	forget_caller();
	for (unsigned i = caller.changes; i-- > 0;)
		if (caller.changing[i] == pid || (caller.changes == 32 && has_ended(caller.changing[i])))
			end_change(i);
	if (caller.changes == 32)
		caller.never = 1;
	else
		caller.changing[caller.changes++] = pid;
}

/* It makes another call, so the one before has ended. */
static void caller_calls(pid_t pid)
{
	caller.met = 0;
	for (unsigned i = caller.changes; i-- > 0;)
		if (caller.changing[i] == pid)
			end_change(i);
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
	if (!again || caller.changes || caller.never)
		return 0;
	caller.process = sys_pidfd_open(pid); /* none of a thread that does not lead its process */
	caller.pid = caller.process < 0 ? 0 : pid;
	return caller.pid == pid;
}

/* A thread that does not lead its process takes over the leader's number when it executes, and may have a directory and a
 * umask of its own. */
static void caller_executes(pid_t pid)
{
	owned_fd process = sys_pidfd_open(pid);
	forget_caller();
	caller.never |= process < 0;
}

/* Where a path of the caller begins. `always`: also if it is absolute. */
static void open_directory(pid_t pid, int dirfd, int always, struct place *place)
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
	const char *name = dirfd == AT_FDCWD ? proc_name(pid, "cwd", -1) : proc_name(pid, "fd", dirfd < 0 ? INT_MAX : dirfd);
	place->dir = openat(observer.proc, name, O_PATH | O_CLOEXEC);
	if (place->borrowed)
		caller.directory = place->dir;
}

static void close_place(struct place *place)
{
	if (place->dir >= 0 && !place->borrowed)
		close_fd(&place->dir);
	place->dir = -1;
}
#define owned_place __attribute__((cleanup(close_place))) struct place

/* Reads a path of the caller, and where it begins. Answers the call itself if that is impossible, and returns -1.
 * Before anything is changed or written down, `still_waits` has to say that this was the caller. */
static int find(const struct seccomp_notif *call, int dirfd, uint64_t address, int always, struct place *place)
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

/* --- looking at files --- */

static int look_up(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = resolve | RESOLVE_NO_MAGICLINKS};
	return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

/* In /proc a name means something else to each process; and what is in it of the observer must never reach a program. */
static int is_in_proc(int fd)
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
static int may_differ(const struct place *place, int *links)
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

/* The caller's, for what is made in its place. */
static int take_umask(pid_t pid)
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

static enum observed_action action_of(uint64_t flags)
{
	if (flags & O_PATH)
		return OBSERVED_READ;
	if ((flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC)
		return OBSERVED_WRITE;
	return OBSERVED_READ;
}

enum { KNOWN_FLAGS = O_ACCMODE | O_APPEND | O_ASYNC | O_CLOEXEC | O_CREAT | O_DIRECT | O_DIRECTORY | O_DSYNC | O_EXCL |
		     O_LARGEFILE | O_NOATIME | O_NOCTTY | O_NOFOLLOW | O_NONBLOCK | O_PATH | O_SYNC | O_TMPFILE | O_TRUNC |
		     0100000 /* O_LARGEFILE on 64 bits */ };

/* Opens what was looked up once more, with the flags of the caller: no name is resolved a second time. */
static int open_again(int found, uint64_t flags, uint64_t mode)
{
	return openat(observer.own, own_name(found), (int)(flags & ~(uint64_t)(O_CREAT | O_EXCL | O_NOFOLLOW)) | O_NOCTTY | O_CLOEXEC,
		      (mode_t)mode);
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
static int predict_change(const struct place *place)
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

static void open_file(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags, uint64_t mode,
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

static void open_by_structure(const struct seccomp_notif *call)
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

/* --- names in directories --- */

/* Splits a place into the directory that holds the name, opened, and the name with the slashes after it. Negative
 * error numbers: the kernel may see it differently. */
static int open_parent(const struct place *place, struct place *inner)
{
	size_t length = strlen(place->path), end = length;
	while (end && place->path[end - 1] == '/')
		end--;
	size_t start = end;
	while (start && place->path[start - 1] != '/')
		start--;
	if (end == 0)
		return -ELOOP; /* the root, or nothing */
	char kept = place->path[start];
	if (start) {
		place->path[start] = '\0';
		inner->dir = look_up(place->dir, place->path, O_PATH | O_DIRECTORY, 0, 0);
		place->path[start] = kept;
	} else {
		inner->dir = look_up(place->dir, ".", O_PATH | O_DIRECTORY, 0, 0);
	}
	inner->path = place->path + start;
	if (inner->dir < 0)
		return errno;
	return is_in_proc(inner->dir) ? -ELOOP : 0;
}

struct change {
	enum observed_action action;
	enum { MAKE_DIRECTORY, MAKE_LINK, MAKE_SYMLINK, REMOVE, RENAME } kind;
	int dirs[2];
	uint64_t addresses[2]; /* of a symbolic link: its text first */
	uint64_t mode, flags;
};

static int perform(const struct change *change, const struct place *one, const struct place *other)
{
	switch (change->kind) {
	case MAKE_DIRECTORY:
		return mkdirat(one->dir, one->path, (mode_t)change->mode);
	case MAKE_LINK:
		return linkat(one->dir, one->path, other->dir, other->path, 0);
	case MAKE_SYMLINK:
		return symlinkat(other->path, one->dir, one->path);
	case REMOVE:
		return unlinkat(one->dir, one->path, (int)change->flags);
	case RENAME:
		return (int)syscall(SYS_renameat2, one->dir, one->path, other->dir, other->path, change->flags);
	}
	errno = EINVAL;
	return -1;
}

static void change_names(const struct seccomp_notif *call, const struct change *change)
{
	pid_t pid = (pid_t)call->pid;
	int pair = change->kind == RENAME || change->kind == MAKE_LINK;
	owned_place first = {-1, paths[0], 0}, second = {-1, paths[1], 0}, inner = {-1, NULL, 0}, inner_second = {-1, NULL, 0};
	if (find(call, change->dirs[0], change->addresses[0], 0, &first))
		return;
	if (pair && find(call, change->dirs[1], change->addresses[1], 0, &second))
		return;
	if (change->kind == MAKE_SYMLINK && read_path(pid, change->addresses[1], paths[1])) {
		go_on(call);
		return;
	}
	if (!still_waits(call))
		return;
	if (!observer.performs) {
		int error = predict_change(&first);
		observe(pid, change->action, error || !pair ? error : predict_change(&second), &first, pair ? &second : NULL);
		go_on(call);
		return;
	}
	int error = open_parent(&first, &inner);
	if (error == 0 && pair)
		error = open_parent(&second, &inner_second);
	if (change->kind == MAKE_SYMLINK)
		inner_second.path = paths[1];
	if (error < 0 || (change->kind == MAKE_DIRECTORY && take_umask(pid))) {
		go_on(call);
		return;
	}
	if (error == 0 && perform(change, &inner, &inner_second))
		error = errno;
	if (error) {
		int links = 0;
		/* The directories were opened, so that only a failure before that could be another for the program. */
		int differs = inner.dir < 0 ? may_differ(&first, &links) : pair && inner_second.dir < 0 && may_differ(&second, &links);
		if (!differs || links)
			observe(pid, change->action, error, &first, pair ? &second : NULL);
		if (differs)
			go_on(call);
		else
			answer(call, error, 0);
		return;
	}
	observe(pid, change->action, 0, &first, pair ? &second : NULL);
	answer(call, 0, 0);
}

/* --- what only the program can do --- */

/* The kernel opens the file before it reads the arguments (Linux 6.8), and these are nowhere: EFAULT means that
 * the file may be executed. Before, it always says so. */
static void observe_execution(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags)
{
	owned_place place = {-1, paths[0], 0};
	if (find(call, dirfd, address, 0, &place))
		return;
	if (!still_waits(call))
		return;
	int error = 0, links = 0;
	owned_fd found = look_up(place.dir, place.path, O_PATH | (flags & AT_SYMLINK_NOFOLLOW ? O_NOFOLLOW : 0), 0, 0);
	if (found < 0)
		error = may_differ(&place, &links) && !links ? 0 : errno;
	else if (!is_in_proc(found) && syscall(SYS_execveat, found, "", (void *)8, NULL, AT_EMPTY_PATH) && errno != EFAULT)
		error = errno;
	if (place.path[0] || !(flags & AT_EMPTY_PATH))
		observe((pid_t)call->pid, OBSERVED_EXECUTE, error, &place, NULL);
	executing.pid = 0;
	close_place(&place);
	caller_executes((pid_t)call->pid);
	go_on(call);
}

static void observe_entry(const struct seccomp_notif *call)
{
	owned_place place = {-1, paths[0], 0};
	int links = 0;
	if (find(call, AT_FDCWD, call->data.args[0], 0, &place)) {
		caller_changes((pid_t)call->pid);
		return;
	}
	owned_fd found = look_up(place.dir, place.path, O_PATH | O_DIRECTORY, 0, 0);
	int error = found < 0 ? errno : 0;
	if (found >= 0 && syscall(SYS_faccessat2, found, "", X_OK, AT_EMPTY_PATH | AT_EACCESS))
		error = errno;
	if (error && still_waits(call) && (!may_differ(&place, &links) || links))
		observe((pid_t)call->pid, OBSERVED_READ, error, &place, NULL);
	close_place(&place);
	caller_changes((pid_t)call->pid);
	go_on(call);
}

union address {
	struct sockaddr any;
	struct sockaddr_in ipv4;
	struct sockaddr_in6 ipv6;
	struct sockaddr_un local;
};

/* What the kernel says to a socket of the observer's own. Nothing is sent: a datagram socket only looks for a route. */
static int try_address(const union address *address, socklen_t size, int binds)
{
	owned_fd trial = socket(address->any.sa_family, (binds ? SOCK_STREAM : SOCK_DGRAM) | SOCK_CLOEXEC, 0);
	if (trial < 0)
		return errno;
	int result = binds ? bind(trial, &address->any, size) : connect(trial, &address->any, size);
	return result && errno != EADDRINUSE ? errno : 0;
}

static void observe_local(const struct seccomp_notif *call, const union address *address, size_t size, int binds)
{
	pid_t pid = (pid_t)call->pid;
	enum observed_action action = binds ? OBSERVED_BIND : OBSERVED_CONNECT;
	size_t length = size > offsetof(struct sockaddr_un, sun_path) ? size - offsetof(struct sockaddr_un, sun_path) : 0;
	char *text = texts[1];
	if (length && address->local.sun_path[0] == '\0') { /* an abstract name */
		snprintf(text, LONGEST, "unix:@%.*s", (int)length - 1, address->local.sun_path + 1);
		observe_text(pid, action, 0, text);
		go_on(call);
		return;
	}
	snprintf(paths[0], PATH_MAX, "%.*s", (int)length, address->local.sun_path);
	owned_place place = {-1, paths[0], 0};
	open_directory(pid, AT_FDCWD, 0, &place);
	if (length == 0 || place.dir == -1 || !still_waits(call)) {
		go_on(call);
		return;
	}
	int error = 0, links;
	if (binds) {
		error = predict_change(&place);
	} else {
		owned_fd found = look_up(place.dir, place.path, O_PATH, 0, 0);
		if (found < 0)
			error = errno;
		else if (syscall(SYS_faccessat2, found, "", W_OK, AT_EMPTY_PATH | AT_EACCESS))
			error = errno;
	}
	if (error == 0 || !may_differ(&place, &links) || links) {
		snprintf(text, LONGEST, "unix:%s", text_of(&place, texts[0]));
		observe_text(pid, action, error, text);
	}
	go_on(call);
}

static void observe_address(const struct seccomp_notif *call, int binds)
{
	union address address = {0};
	char host[INET6_ADDRSTRLEN], text[INET6_ADDRSTRLEN + 16];
	size_t size = (size_t)call->data.args[2];
	if (size > sizeof address || size < sizeof address.any.sa_family) {
		go_on(call);
		return;
	}
	ssize_t got = read_memory((pid_t)call->pid, call->data.args[1], &address, size);
	if (got != (ssize_t)size) {
		if (got < 0 && errno != EFAULT)
			count_unread(call);
		else
			go_on(call);
		return;
	}
	if (!still_waits(call))
		return;
	if (address.any.sa_family == AF_UNIX) {
		observe_local(call, &address, size, binds);
		return;
	}
	if (address.any.sa_family == AF_INET && size >= sizeof address.ipv4) {
		inet_ntop(AF_INET, &address.ipv4.sin_addr, host, sizeof host);
		snprintf(text, sizeof text, "%s:%u", host, ntohs(address.ipv4.sin_port));
	} else if (address.any.sa_family == AF_INET6 && size >= sizeof address.ipv6) {
		inet_ntop(AF_INET6, &address.ipv6.sin6_addr, host, sizeof host);
		snprintf(text, sizeof text, "[%s]:%u", host, ntohs(address.ipv6.sin6_port));
	} else {
		go_on(call);
		return;
	}
	observe_text((pid_t)call->pid, binds ? OBSERVED_BIND : OBSERVED_CONNECT,
		     try_address(&address, (socklen_t)size, binds), text);
	go_on(call);
}

/* --- calls --- */

static void change_one(const struct seccomp_notif *call, enum observed_action action, int kind, int dir, uint64_t address,
		       uint64_t mode, uint64_t flags)
{
	struct change change = {action, kind, {dir, AT_FDCWD}, {address, 0}, mode, flags};
	change_names(call, &change);
}

static void change_two(const struct seccomp_notif *call, enum observed_action action, int kind, int one, uint64_t from,
		       int other, uint64_t to, uint64_t flags)
{
	struct change change = {action, kind, {one, other}, {from, to}, 0, flags};
	change_names(call, &change);
}

static void handle(const struct seccomp_notif *call)
{
	const __u64 *args = call->data.args;
	uint32_t verdict = verdict_on(&call->data);
	if (verdict != SECCOMP_RET_ALLOW) {
		int error = (verdict & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_ERRNO && verdict & SECCOMP_RET_DATA
				? (int)(verdict & SECCOMP_RET_DATA)
				: EPERM;
		struct observation record = {
		    .action = OBSERVED_CALL, .error = error, .call = (uint32_t)call->data.nr, .program = program_of((pid_t)call->pid)};
		if ((pid_t)call->pid != observer.init)
			note(record, "", "");
		answer(call, error, 0);
		return;
	}
	if ((pid_t)call->pid == observer.init) {
		go_on(call);
		return;
	}
	caller_calls((pid_t)call->pid);
	switch (call->data.nr) {
#ifdef SYS_open
	case SYS_open:
		open_file(call, AT_FDCWD, args[0], args[1] & KNOWN_FLAGS, args[2] & 07777, 0);
		return;
	case SYS_creat:
		open_file(call, AT_FDCWD, args[0], O_CREAT | O_WRONLY | O_TRUNC, args[1] & 07777, 0);
		return;
	case SYS_mkdir:
		change_one(call, OBSERVED_CREATE, MAKE_DIRECTORY, AT_FDCWD, args[0], args[1], 0);
		return;
	case SYS_rmdir:
		change_one(call, OBSERVED_REMOVE, REMOVE, AT_FDCWD, args[0], 0, AT_REMOVEDIR);
		return;
	case SYS_unlink:
		change_one(call, OBSERVED_REMOVE, REMOVE, AT_FDCWD, args[0], 0, 0);
		return;
	case SYS_rename:
		change_two(call, OBSERVED_RENAME, RENAME, AT_FDCWD, args[0], AT_FDCWD, args[1], 0);
		return;
	case SYS_link:
		change_two(call, OBSERVED_RENAME, MAKE_LINK, AT_FDCWD, args[0], AT_FDCWD, args[1], 0);
		return;
	case SYS_symlink:
		change_two(call, OBSERVED_CREATE, MAKE_SYMLINK, AT_FDCWD, args[1], AT_FDCWD, args[0], 0);
		return;
#endif
#ifdef SYS_renameat
	case SYS_renameat:
		change_two(call, OBSERVED_RENAME, RENAME, (int)args[0], args[1], (int)args[2], args[3], 0);
		return;
#endif
	case SYS_openat:
		open_file(call, (int)args[0], args[1], args[2] & KNOWN_FLAGS, args[3] & 07777, 0);
		return;
	case SYS_openat2:
		open_by_structure(call);
		return;
	case SYS_mkdirat:
		change_one(call, OBSERVED_CREATE, MAKE_DIRECTORY, (int)args[0], args[1], args[2], 0);
		return;
	case SYS_unlinkat:
		change_one(call, OBSERVED_REMOVE, REMOVE, (int)args[0], args[1], 0, args[2]);
		return;
	case SYS_renameat2:
		change_two(call, OBSERVED_RENAME, RENAME, (int)args[0], args[1], (int)args[2], args[3], args[4] & 0xffffffff);
		return;
	case SYS_linkat:
		if (args[4] & 0xffffffff) { /* of a file without a name, by a link in /proc, or of what a link leads to */
			go_on(call);
			return;
		}
		change_two(call, OBSERVED_RENAME, MAKE_LINK, (int)args[0], args[1], (int)args[2], args[3], 0);
		return;
	case SYS_symlinkat:
		change_two(call, OBSERVED_CREATE, MAKE_SYMLINK, (int)args[1], args[2], AT_FDCWD, args[0], 0);
		return;
	case SYS_execve:
		observe_execution(call, AT_FDCWD, args[0], 0);
		return;
	case SYS_execveat:
		observe_execution(call, (int)args[0], args[1], args[4]);
		return;
	case SYS_connect:
		observe_address(call, 0);
		return;
	case SYS_bind:
		observe_address(call, 1);
		return;
	case SYS_chdir:
		observe_entry(call);
		return;
	case SYS_fchdir:
	case SYS_umask:
		caller_changes((pid_t)call->pid);
		go_on(call);
		return;
	case SYS_landlock_restrict_self:
		observer.performs = 0;
		go_on(call);
		return;
	}
	answer(call, EPERM, 0); /* the filter notifies of nothing else */
}

/* --- its life --- */

/* What the observer itself may call. */
static int confine_observer(void)
{
	static const int calls[] = {
	    SYS_ioctl, SYS_process_vm_readv, SYS_openat, SYS_openat2, SYS_close, SYS_fstat, SYS_newfstatat, SYS_fstatfs,
	    SYS_readlinkat, SYS_read, SYS_fcntl, SYS_umask, SYS_mkdirat, SYS_unlinkat, SYS_renameat2, SYS_linkat, SYS_symlinkat,
	    SYS_faccessat2, SYS_execveat, SYS_socket, SYS_connect, SYS_bind, SYS_pidfd_open, SYS_ppoll,
#ifdef SYS_poll
	    SYS_poll,
#endif
	    SYS_futex, SYS_exit, SYS_exit_group,
	};
	enum { COUNT = sizeof calls / sizeof *calls };
	struct sock_filter lines[COUNT + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
	for (unsigned i = 0; i < COUNT; i++)
		lines[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i], (uint8_t)(COUNT - i), 0);
	lines[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
	lines[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = {.len = COUNT + 3, .filter = lines};
	if (sys_seccomp_filter(0, &program))
		return -1;
	if (session_keyring() >= 0 || errno != EPERM) {
		errno = ENODATA;
		return -1;
	}
	return 0;
}

/* Newer kernels may have more to say than there is room for. */
static int has_known_sizes(void)
{
	struct seccomp_notif_sizes sizes;
	if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes))
		return 0;
	errno = EOVERFLOW;
	return sizes.seccomp_notif == sizeof(struct seccomp_notif) && sizes.seccomp_notif_resp == sizeof(struct seccomp_notif_resp);
}

static const char *get_ready(void)
{
	unsigned kept = (unsigned)observer.listener;
	if (!has_known_sizes())
		return "sizes";
	if (unshare(CLONE_FILES | CLONE_FS))
		return "unshare";
	if ((kept > 3 && sys_close_range(3, kept - 1)) || sys_close_range(kept + 1, ~0u))
		return "descriptors";
	observer.proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	observer.own = openat(observer.proc, "thread-self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (observer.proc < 0 || observer.own < 0)
		return "/proc";
	struct stat info;
	if (fstat(observer.proc, &info) || !is_in_proc(observer.proc))
		return "/proc";
	if (observer.alone)
		observer.only_proc = info.st_dev;
	if (chdir("/"))
		return "/";
	/* By value, not by address. Before Linux 6.6 an answer takes longer, and that is all. */
	ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
	return confine_observer() ? "filter" : NULL;
}

static void *watch(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, "stockade-watch");
	while (sem_wait(&observer.handed))
		;
	observer.what = get_ready();
	observer.problem = errno;
	sem_post(&observer.ready);
	while (!observer.what) {
		struct seccomp_notif call = {0};
		if (ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_RECV, &call) == 0)
			handle(&call);
		else if (errno != EINTR && errno != ENOENT) /* ENOENT: the caller was killed meanwhile */
			_exit(1);
	}
	return NULL;
}

int observer_map(const struct launch *launch)
{
	const struct plan *plan = &launch->plan;
	unsigned last = plan->count - 1;
	struct stat info;
	if (last == 0 || plan->ops[last - 1].type != OP_OBSERVE)
		return 0;
	int memory = launch->descriptors[launch->descriptor_count - 1];
	if (fstat(memory, &info))
		return -1;
	if (info.st_size != OBSERVATIONS_SIZE) {
		errno = EINVAL;
		return -1;
	}
	observer.memory = mmap(NULL, OBSERVATIONS_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	unsigned procs = 0;
	for (unsigned i = plan->base + 1; i < last; i++)
		procs += plan->ops[i].type == OP_PROC;
	observer.alone = procs == 1 && !plan_is_plain(plan->ops);
	if (observer.memory == MAP_FAILED || madvise(observer.memory, OBSERVATIONS_SIZE, MADV_DONTFORK))
		return -1;
	memcpy(observer.memory->magic, OBSERVATIONS_MAGIC, sizeof observer.memory->magic);
	return 0;
}

int observer_start(const struct op *op)
{
	pthread_t thread;
	pthread_attr_t attributes;
	sigset_t all, before;
	observer.filter = (const struct sock_filter *)op->blob;
	observer.filter_length = op->b / sizeof(struct sock_filter);
	observer.everything = op->a == OBSERVE_EVERYTHING;
	observer.performs = 1;
	observer.init = getpid();
	if (sem_init(&observer.handed, 0, 0) || sem_init(&observer.ready, 0, 0))
		return -1;
	/* No signal is the observer's: init hears them all. */
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, &before);
	errno = pthread_attr_init(&attributes);
	if (errno == 0)
		errno = pthread_attr_setstacksize(&attributes, STACK_SIZE);
	if (errno == 0)
		errno = pthread_create(&thread, &attributes, watch, NULL);
	int error = errno;
	sigprocmask(SIG_SETMASK, &before, NULL);
	observer.started = error == 0;
	errno = error;
	return error ? -1 : 0;
}

int observer_flags(void)
{
	return observer.started ? SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV : 0;
}

int observer_listen(int listener)
{
	observer.listener = listener;
	sem_post(&observer.handed);
	while (sem_wait(&observer.ready))
		;
	close(listener); /* the observer has its own */
	errno = observer.problem;
	return observer.what ? -1 : 0;
}
