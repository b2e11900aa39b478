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
#include "observer.h"

#include <linux/filter.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

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

enum { STACK_SIZE = 512 << 10 };

struct observer observer = {.listener = -1, .proc = -1, .own = -1};

/* Between init, which starts it, and its thread. */
static sem_t handed, ready;
static int started, problem;
static const char *what; /* failed */
static int alone;        /* the plan mounts one process file system, over a root of its own */

/* If the caller has died meanwhile, there is nobody to answer. */
void answer(const struct seccomp_notif *call, int error, uint32_t flags)
{
	struct seccomp_notif_resp reply = {.id = call->id, .error = -error, .flags = flags};
	if (ioctl(observer.listener, SECCOMP_IOCTL_NOTIF_SEND, &reply) && errno != ENOENT && errno != EINTR)
		_exit(1);
}

void go_on(const struct seccomp_notif *call)
{
	answer(call, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE);
}

void count_unread(const struct seccomp_notif *call)
{
	__atomic_add_fetch(&observer.memory->unread, 1, __ATOMIC_RELAXED);
	go_on(call);
}

/* The program gets the descriptor as the answer to its call; if it has no room for one, the call fails. */
void hand_over(const struct seccomp_notif *call, int fd, int close_on_exec)
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

/* Of open and openat: the kernel ignores what it does not know, and with O_PATH nearly everything. */
static uint64_t heeded(uint64_t flags)
{
	return flags & (flags & O_PATH ? O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC : KNOWN_FLAGS);
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
		char option[24] = "";
		if (call->data.nr == SYS_setsockopt || call->data.nr == SYS_getsockopt)
			snprintf(option, sizeof option, "%u %u", (unsigned)args[1], (unsigned)args[2]);
		if ((pid_t)call->pid != observer.init)
			note(record, "", option);
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
		open_file(call, AT_FDCWD, args[0], heeded(args[1]), args[2] & 07777, 0);
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
		open_file(call, (int)args[0], args[1], heeded(args[2]), args[3] & 07777, 0);
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

/* What the observer itself may call. */
static int confine_observer(void)
{
	static const int calls[] = {
	    SYS_ioctl, SYS_process_vm_readv, SYS_openat, SYS_openat2, SYS_close, SYS_fstat, SYS_newfstatat, SYS_fstatfs,
	    SYS_readlinkat, SYS_read, SYS_fcntl, SYS_umask, SYS_mkdirat, SYS_unlinkat, SYS_renameat2, SYS_linkat, SYS_symlinkat,
	    SYS_faccessat2, SYS_execveat, SYS_socket, SYS_connect, SYS_bind, SYS_pidfd_open, SYS_pidfd_getfd, SYS_ppoll,
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
	if (alone)
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
	while (sem_wait(&handed))
		;
	what = get_ready();
	problem = errno;
	sem_post(&ready);
	while (!what) {
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
	alone = procs == 1 && !plan_is_plain(plan->ops);
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
	if (sem_init(&handed, 0, 0) || sem_init(&ready, 0, 0))
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
	started = error == 0;
	errno = error;
	return error ? -1 : 0;
}

int observer_flags(void)
{
	return started ? SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV : 0;
}

int observer_listen(int listener)
{
	observer.listener = listener;
	sem_post(&handed);
	while (sem_wait(&ready))
		;
	close(listener); /* the observer has its own */
	errno = problem;
	return what ? -1 : 0;
}
