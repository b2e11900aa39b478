/* A sandbox that a helper makes: bubblewrap, where that is wanted or is the only one that may.
 *
 *   resident ─► usher ─► helper ─► init ─► programs
 *
 * The helper makes the namespaces and the mounts, drops every capability, loads the filter and executes the
 * gate, by a descriptor, so that it lies nowhere inside. The gate looks at what the plan says, raises what the
 * helper does not know, and serves as it does elsewhere. The usher opens every source without following a
 * link, compares it with what the supervisor judged, and hands it down by number; it stays as the helper's
 * parent, has one thread, and so is what --die-with-parent can rely on: the helper dies with it and the gate
 * with the helper. What the helper says of the process it started, the usher compares with who speaks to it.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* How long init may take beyond the grace of its programs when the supervisor is gone. */
enum { EXTRA_MS = 2000, STATUS_SIZE = 1024 };

/* How many descriptors an operation needs. */
static unsigned needs(const struct op *op)
{
	switch (op->type) {
	case OP_FILE:
		return HELD_BY_FILE;
	case OP_BIND:
		return HELD_BY_BIND;
	case OP_OVERLAY:
		return HELD_BY_OVERLAY;
	case OP_VIEW:
		return HELD_BY_VIEW;
	case OP_SECCOMP:
		return HELD_BY_SECCOMP;
	case OP_CGROUP:
		return HELD_BY_CGROUP;
	}
	return 0;
}

/* Whether init keeps it; the rest is the helper's. */
static int is_for_gate(const struct op *op, unsigned part)
{
	return op->type == OP_VIEW || op->type == OP_OVERLAY || op->type == OP_CGROUP || (op->type == OP_BIND && part);
}

void held_close(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->count; i++)
		for (unsigned part = 0; part < needs(&plan->ops[i]); part++)
			if (is_for_gate(&plan->ops[i], part))
				close(held_number(plan, i) + (int)part);
}

int held_number(const struct plan *plan, unsigned index)
{
	unsigned number = HELD_FIRST;
	for (unsigned i = 0; i < index; i++)
		number += needs(&plan->ops[i]);
	return (int)number;
}

static int memory_file(const void *bytes, size_t size)
{
	owned_fd file = memfd_create("stockade", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (file < 0)
		return -1;
	ssize_t wrote = write(file, bytes, size);
	if (wrote >= 0 && (size_t)wrote == size && lseek(file, 0, SEEK_SET) == 0 &&
	    fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
		return take_fd(&file);
	return -1;
}

/* The caller's part of the kernel's file by which a process enters: opened here, where its path is known. */
static int open_cgroup(const int *descriptors, const struct op *op)
{
	int passed = descriptors[op->b - 1];
	return op->a == 2 ? openat(passed, "cgroup.procs", O_WRONLY | O_CLOEXEC)
			  : fcntl(passed, F_DUPFD_CLOEXEC, 0);
}

/* What an operation needs, opened; 0 or -1. */
static int open_needed(const int *descriptors, const struct op *op, int found[2], const char **culprit)
{
	*culprit = op->s[1] ? op->s[1] : op->s[0];
	switch (op->type) {
	case OP_FILE:
	case OP_SECCOMP:
		found[0] = memory_file(op->blob, op->b);
		break;
	case OP_CGROUP:
		*culprit = "enter";
		found[0] = open_cgroup(descriptors, op);
		break;
	case OP_VIEW:
		found[0] = open_source(descriptors, op->s[1], op->b);
		break;
	case OP_BIND:
		found[0] = open_source(descriptors, op->s[1], op->b);
		if (found[0] < 0)
			break;
		found[1] = fcntl(found[0], F_DUPFD_CLOEXEC, 0);
		return found[1] < 0 ? -1 : 0;
	case OP_OVERLAY:
		found[0] = open_source(descriptors, op->s[1], op->b);
		if (found[0] < 0)
			break;
		*culprit = op->s[3];
		owned_fd work = open_source(descriptors, op->s[3], op->b + 2); /* only looked at */
		if (work < 0)
			return -1;
		*culprit = op->s[2];
		found[1] = open_source(descriptors, op->s[2], op->b + 1);
		return found[1] < 0 ? -1 : 0;
	}
	return found[0] < 0 ? -1 : 0;
}

static _Noreturn void refuse(int socket, unsigned index, uint32_t op, int error, const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text ? text : "");
	send_reply(socket, &reply, NULL, 0);
	_exit(1);
}

/* Moves the helper's descriptors to their numbers, by way of numbers that none of them has. */
static int place_descriptors(int *held, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		if ((held[i] = fcntl(held[i], F_DUPFD, (int)(HELD_SOCKET + count))) < 0)
			return -1;
	for (unsigned i = 0; i < count; i++)
		if (dup2(held[i], HELD_SOCKET + (int)i) < 0)
			return -1;
	return sys_close_range(HELD_SOCKET + count, ~0u);
}

static _Noreturn void become_helper(const char *helper, int *held, unsigned count, int words, unsigned mask,
				    const char *sabotage, pid_t usher)
{
	char arguments[16], gate[32], umask_text[16];
	snprintf(arguments, sizeof arguments, "%d", HELD_ARGUMENTS);
	snprintf(gate, sizeof gate, "/proc/self/fd/%d", HELD_GATE);
	snprintf(umask_text, sizeof umask_text, "%u", mask);
	const char *argv[] = {"bwrap", "--args", arguments, "--", gate, "helped", umask_text, sabotage, NULL};
	static char *none[] = {NULL};
	sigset_t all;
	sigemptyset(&all);
	signal(SIGPIPE, SIG_DFL);
	/* The helper asks for the same, but later; it may never come to that. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != usher)
		_exit(127);
	if (dup2(words, 2) == 2 && place_descriptors(held, count) == 0 && sigprocmask(SIG_SETMASK, &all, NULL) == 0)
		execve(helper, (char **)(uintptr_t)argv, none);
	dprintf(2, "%s: %s\n", helper, strerror(errno));
	_exit(127);
}

struct visit {
	pid_t helper, init;
	int pidfd;     /* of the helper */
	int word;      /* a socket to init */
	int status;    /* what the helper says of the process that it has started */
	int words;     /* what it complains about */
	int supervisor;
};

/* Kills the helper and what it has started; nothing is left when this returns. A helper that dies early has not
 * yet tied what it started to its own life: that becomes the usher's child, and would wait for a word. */
static void end_all(const struct visit *visit)
{
	pid_t ended;
	close(visit->word);
	kill(visit->helper, SIGKILL);
	for (;;) {
		while ((ended = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (ended < 0 && errno == ECHILD)
			return;
		signal_descendants(NULL, SIGKILL, NOBODY);
		poll(NULL, 0, 1);
	}
}

/* The last line that the helper wrote; it fits into a reply. */
static void last_line(int from, char *text, size_t size)
{
	char said[4096];
	size_t length = 0;
	fcntl(from, F_SETFL, O_NONBLOCK);
	for (ssize_t got; length < sizeof said - 1 && (got = read(from, said + length, sizeof said - 1 - length)) > 0;)
		length += (size_t)got;
	while (length && said[length - 1] == '\n')
		length--;
	said[length] = '\0';
	const char *line = strrchr(said, '\n');
	snprintf(text, size, "%.199s", line ? line + 1 : said);
}

/* The sender of a message, as the kernel knows it; -1 if there will be none. */
static pid_t receive_sender(int word)
{
	union {
		char bytes[CMSG_SPACE(sizeof(struct ucred))];
		struct cmsghdr align;
	} control;
	uint32_t said;
	struct iovec data = {&said, sizeof said};
	struct msghdr message = {
	    .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	if (recvmsg(word, &message, MSG_CMSG_CLOEXEC) != sizeof said)
		return -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	struct ucred who = {.pid = -1};
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS)
		memcpy(&who, CMSG_DATA(header), sizeof who);
	return who.pid;
}

/* Waits until init is there. 0, or -1: the helper has failed, or the supervisor has given up. */
static int await_init(struct visit *visit, int socket)
{
	for (;;) {
		/* Of the socket only its end: the supervisor has given up waiting. */
		struct pollfd watched[] = {{visit->word, POLLIN, 0},
					   {visit->supervisor, POLLIN, 0},
					   {visit->pidfd, POLLIN, 0},
					   {socket, 0, 0}};
		if (poll(watched, 4, -1) < 0 && errno != EINTR)
			return -1;
		if (watched[1].revents || watched[3].revents || (watched[2].revents && !(watched[0].revents & POLLIN)))
			return -1;
		if (watched[0].revents) {
			visit->init = receive_sender(visit->word);
			return visit->init > 0 ? 0 : -1;
		}
	}
}

/* Whether a child has succeeded. */
static int has_succeeded(pid_t pid)
{
	int status;
	while (pid > 0 && waitpid(pid, &status, 0) != pid)
		if (errno != EINTR)
			return 0;
	return pid > 0 && status == 0;
}

/* Whether no other user namespace can be made in that of init: tried by a child of the usher that enters it,
 * because the filter, which refuses it too, would hide the answer. */
static int is_sealed(int namespace)
{
	pid_t pid = fork();
	if (pid == 0) {
		if (setns(namespace, CLONE_NEWUSER))
			_exit(2);
		_exit(unshare(CLONE_NEWUSER) < 0 && errno == ENOSPC ? 0 : 1);
	}
	return has_succeeded(pid);
}

/* Adds to the tree what the helper has no words for; the child itself says what failed. */
static int finish_tree(const struct launch *launch, int mounts)
{
	unsigned index = 0;
	const struct plan *plan = &launch->plan;
	pid_t pid = fork();
	if (pid == 0) {
		if (helper_tree_enter(mounts))
			refuse(launch->socket, 0, OP_NAMESPACES, errno, "enter");
		if (helper_tree_finish(plan, &index))
			refuse(launch->socket, index, plan->ops[index].type, errno, plan->ops[index].s[0]);
		_exit(0);
	}
	return has_succeeded(pid) ? 0 : -1;
}

/* Tells the supervisor of the sandbox: who is in it, by what the helper said, and its namespaces. */
static const char *tell_born(const struct visit *visit, const struct launch *launch)
{
	struct reply born = {.kind = REPLY_BORN, .status = (uint32_t)visit->init};
	int shown[8] = {sys_pidfd_open(getpid()), -1, -1, -1, -1, -1, -1, -1};
	if (shown[0] < 0)
		return "pidfd";
	owned_fd gate = sys_pidfd_open(visit->init);
	if (gate < 0)
		return "pidfd";
	/* The helper said so before it started init, which has spoken. */
	fcntl(visit->status, F_SETFL, O_NONBLOCK);
	ssize_t got = read(visit->status, born.text, sizeof born.text - 1);
	born.text[got > 0 ? got : 0] = '\0';
	for (unsigned i = 1; i < 8; i++) {
		shown[i] = namespace_of(visit->init, gate, i - 1);
		if (shown[i] < 0)
			return "namespaces";
	}
	if (!is_sealed(shown[1])) {
		errno = ENODATA;
		return "a user namespace that must be refused";
	}
	if (finish_tree(launch, shown[2])) {
		errno = ENODATA;
		return "tree";
	}
	uint32_t word = 0;
	if (send_reply(launch->socket, &born, shown, 8) || send_message(visit->word, &word, sizeof word, NULL, 0))
		return "word";
	close_fds(shown, 8);
	return NULL;
}

/* Until the helper has ended, and everything with it. */
static _Noreturn void await_end(struct visit *visit)
{
	struct pollfd watched[] = {{visit->pidfd, POLLIN, 0}, {visit->supervisor, POLLIN, 0}};
	uint64_t deadline = 0;
	for (;;) {
		uint64_t now = now_ms();
		if (deadline && now >= deadline)
			break;
		if (poll(watched, 2, deadline ? (int)(deadline - now) : -1) < 0 && errno != EINTR)
			break;
		if (watched[1].revents) {
			/* The gate sees it too, and lets its programs tidy up for a moment. */
			deadline = now_ms() + GRACE_MS + EXTRA_MS;
			watched[1].fd = -1;
			watched[1].revents = 0;
		}
		if (watched[0].revents)
			break;
	}
	end_all(visit);
	_exit(0);
}

/* What the host mounts later in a tree that is shown must not be seen in it, with rules of its own: bubblewrap
 * takes the mounts as they are here. Only root may make them so; others have what the documentation says. */
static int privatise_mounts(void)
{
	if (geteuid() != 0)
		return 0;
	return unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ? -1 : 0;
}

void usher_main(const struct launch *launch, int plan_file, unsigned mask, const char *sabotage)
{
	static int held[MAX_DESCRIPTORS + PLAN_MAX_OPS + HELD_FIRST];
	const struct plan *plan = &launch->plan;
	unsigned count = HELD_FIRST - HELD_SOCKET, helper = 0;
	int status[2], words[2], word[2], yes = 1;
	const char *culprit = "";
	prctl(PR_SET_NAME, "stockade-usher");
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	setsid();
	/* The usher adopts what init or the helper leaves, and so ends after it. */
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
		refuse(launch->socket, 0, OP_HELPER, errno, "subreaper");
	if (privatise_mounts())
		refuse(launch->socket, 0, OP_NAMESPACES, errno, "mounts");
	for (unsigned i = 0; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		int found[2] = {-1, -1};
		if (op->type == OP_HELPER)
			helper = i;
		if (op->type == OP_KEYRING && !sabotaged_op(i)) {
			long before = session_keyring();
			if (wall_keyring() || session_keyring() == before)
				refuse(launch->socket, i, op->type, errno, "replace");
		}
		if (needs(op) && open_needed(launch->descriptors, op, found, &culprit))
			refuse(launch->socket, i, op->type, errno, culprit);
		if (needs(op) && count + 2 > sizeof held / sizeof *held)
			refuse(launch->socket, i, op->type, E2BIG, culprit);
		for (unsigned part = 0; part < needs(op); part++)
			held[count++] = found[part];
	}
	const char *path = (const char *)plan->ops[helper].blob;
	size_t skip = strlen(path) + 1;
	int gate = open("/proc/self/exe", O_PATH | O_CLOEXEC);
	int arguments = memory_file(path + skip, plan->ops[helper].b - skip);
	if (gate < 0 || arguments < 0 || pipe2(status, O_CLOEXEC) || pipe2(words, O_CLOEXEC) ||
	    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, word) ||
	    setsockopt(word[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes))
		refuse(launch->socket, helper, OP_HELPER, errno, "descriptors");
	const int first[] = {launch->socket, plan_file, launch->supervisor, gate, word[1], arguments, status[1]};
	memcpy(held, first, sizeof first);
	pid_t usher = getpid(), pid = fork();
	if (pid == 0)
		become_helper(path, held, count, words[1], mask, sabotage, usher);
	int pidfd = pid < 0 ? -1 : sys_pidfd_open(pid);
	if (pidfd < 0) {
		int error = errno;
		if (pid > 0)
			kill(pid, SIGKILL);
		refuse(launch->socket, helper, OP_HELPER, error, "start");
	}
	struct visit visit = {.helper = pid,
			      .pidfd = pidfd,
			      .word = word[0],
			      .status = status[0],
			      .words = words[0],
			      .supervisor = launch->supervisor};
	close(word[1]);
	close(status[1]);
	close(words[1]);
	for (unsigned i = HELD_FIRST - HELD_SOCKET; i < count; i++)
		close(held[i]);
	for (unsigned i = 0; i < launch->descriptor_count; i++)
		close(launch->descriptors[i]);
	if (await_init(&visit, launch->socket)) {
		end_all(&visit);
		char said[200];
		last_line(visit.words, said, sizeof said);
		refuse(launch->socket, helper, OP_HELPER, 0, said);
	}
	if ((culprit = tell_born(&visit, launch))) {
		int error = errno;
		end_all(&visit);
		refuse(launch->socket, helper, OP_NAMESPACES, error, culprit);
	}
	close(launch->socket);
	close_fd(&visit.word);
	close(visit.words);
	close(visit.status);
	await_end(&visit);
}

/* The gate, as the helper has started it: behind the filter already, without a capability, in the new root. */
void helped_main(int argc, char **argv)
{
	static struct init init = {.tree = NO_TREE, .walls = NO_WALLS, .runs = {.from_warden = -1}};
	static int descriptors[MAX_DESCRIPTORS];
	unsigned char *bytes;
	size_t size;
	struct plan *plan = &init.launch.plan;
	struct plan_error wrong;
	uint32_t word = 0;
	(void)argc;
	init.launch.socket = HELD_SOCKET;
	init.launch.supervisor = HELD_SUPERVISOR;
	init.launch.descriptors = descriptors;
	init.tree.canary = HELD_GATE;
	init.walls.helped = 1;
	init.runs.to_resident = HELD_WORD;
	init.runs.mask = (unsigned)strtoul(argv[2], NULL, 10);
	prctl(PR_SET_NAME, "stockade-gate"); /* not the number of the descriptor that was executed */
	umask(0);
	for (int i = HELD_SOCKET; i <= HELD_WORD; i++)
		fcntl(i, F_SETFD, FD_CLOEXEC);
	close(HELD_ARGUMENTS);
	close(HELD_STATUS);
	dup2(1, 2);
	if (read_whole(HELD_PLAN, PLAN_MAX_SIZE, &bytes, &size) ||
	    plan_decode(bytes, size, MAX_DESCRIPTORS, plan, &wrong) || !plan_is_helped(plan->ops))
		_exit(1);
	close(HELD_PLAN);
	/* Before anything is opened: the helper has closed some of what it was given. */
	for (unsigned i = 0; i < plan->count; i++)
		for (unsigned part = 0; part < needs(&plan->ops[i]); part++) {
			int number = held_number(plan, i) + (int)part;
			if (!is_for_gate(&plan->ops[i], part))
				close(number);
			else if (fcntl(number, F_SETFD, FD_CLOEXEC))
				_exit(1);
			if (plan->ops[i].type == OP_CGROUP)
				descriptors[plan->ops[i].b - 1] = number;
		}
	/* What only init can see: that it dies with the helper, and has a session of its own. */
	int with_parent = 0;
	if (prctl(PR_GET_PDEATHSIG, &with_parent) || with_parent != SIGKILL)
		init.problem = "--die-with-parent";
	else if (getsid(0) != getpid())
		init.problem = "--new-session";
	init.problem_error = ENODATA;
	init.tree.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (init.tree.root < 0 || send_message(HELD_WORD, &word, sizeof word, NULL, 0))
		_exit(1);
	init_main(&init);
}
