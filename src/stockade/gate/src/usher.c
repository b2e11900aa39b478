/* A sandbox that a helper makes: bubblewrap, where that is wanted or is the only one that may.
 *
 *   resident ─► usher ─► helper ─► gate, PID 1 inside ─► programs
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

/* What the gate is given beyond the grace of its programs when the supervisor is gone. */
enum { MORE_MS = 2000, STATUS_SIZE = 1024 };

/* How many descriptors an operation needs: an overlay the directory below and the one above, and what is bound
 * one for the helper, which closes it, and one for the gate, which looks whether it was bound. */
static unsigned needs(const struct op *op)
{
	switch (op->type) {
	case OP_FILE:
	case OP_VIEW:
	case OP_CGROUP:
	case OP_SECCOMP:
		return 1;
	case OP_BIND:
	case OP_OVERLAY:
		return 2;
	}
	return 0;
}

/* For the gate; the rest is the helper's. */
static int is_kept(const struct op *op, unsigned part)
{
	return op->type == OP_VIEW || op->type == OP_OVERLAY || op->type == OP_CGROUP || (op->type == OP_BIND && part);
}

void held_close(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->count; i++)
		for (unsigned part = 0; part < needs(&plan->ops[i]); part++)
			if (is_kept(&plan->ops[i], part))
				close(held_number(plan, i) + (int)part);
}

int held_number(const struct plan *plan, unsigned index)
{
	unsigned number = HELD_FIRST;
	for (unsigned i = 0; i < index; i++)
		number += needs(&plan->ops[i]);
	return (int)number;
}

static int in_memory(const void *bytes, size_t size)
{
	int file = memfd_create("stockade", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (file < 0)
		return -1;
	ssize_t wrote = write(file, bytes, size);
	if (wrote >= 0 && (size_t)wrote == size && lseek(file, 0, SEEK_SET) == 0 &&
	    fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
		return file;
	close(file);
	return -1;
}

/* The caller's part of the kernel's file by which a process enters: opened here, where its path is known. */
static int entrance(const struct box *box, const struct op *op)
{
	int passed = box->descriptors[op->b - 1];
	return op->a == 2 ? openat(passed, "cgroup.procs", O_WRONLY | O_CLOEXEC)
			  : fcntl(passed, F_DUPFD_CLOEXEC, 0);
}

/* What an operation needs, opened; 0 or -1. */
static int obtain(const struct box *box, const struct op *op, int found[2], const char **culprit)
{
	*culprit = op->s[1] ? op->s[1] : op->s[0];
	switch (op->type) {
	case OP_FILE:
	case OP_SECCOMP:
		found[0] = in_memory(op->blob, op->b);
		break;
	case OP_CGROUP:
		*culprit = "enter";
		found[0] = entrance(box, op);
		break;
	case OP_VIEW:
		found[0] = open_source(box, op->s[1], op->b);
		break;
	case OP_BIND:
		found[0] = open_source(box, op->s[1], op->b);
		if (found[0] < 0)
			break;
		found[1] = fcntl(found[0], F_DUPFD_CLOEXEC, 0);
		return found[1] < 0 ? -1 : 0;
	case OP_OVERLAY:
		found[0] = open_source(box, op->s[1], op->b);
		if (found[0] < 0)
			break;
		*culprit = op->s[3];
		int work = open_source(box, op->s[3], op->b + 2);
		if (work < 0)
			return -1;
		close(work);
		*culprit = op->s[2];
		found[1] = open_source(box, op->s[2], op->b + 1);
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

/* The helper's own view of its descriptors: by way of numbers that none of them has. */
static int take_places(int *held, unsigned count)
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
	if (dup2(words, 2) == 2 && take_places(held, count) == 0 && sigprocmask(SIG_SETMASK, &all, NULL) == 0)
		execve(helper, (char **)(uintptr_t)argv, none);
	dprintf(2, "%s: %s\n", helper, strerror(errno));
	_exit(127);
}

struct visit {
	pid_t helper, gate;
	int pidfd;     /* of the helper */
	int word;      /* to the gate */
	int status;    /* what the helper says of the process that it has started */
	int words;     /* what it complains about */
	int supervisor;
};

/* Kills the helper and what it has started; nothing is left when this returns. A helper that dies early has not
 * yet tied what it started to its own life: that becomes ours, and would wait for our word. */
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
static void last_words(int from, char *text, size_t size)
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

/* Who speaks, as the kernel knows it; -1 if nobody does any more. */
static pid_t hear_from(int word)
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

/* Waits until the gate is there. 0, or -1: the helper has failed, or nobody wants it any more. */
static int await_gate(struct visit *visit, int socket)
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
			visit->gate = hear_from(visit->word);
			return visit->gate > 0 ? 0 : -1;
		}
	}
}

/* Whether another user namespace could be made in that of the gate: tried by a child of ours that enters it,
 * because the filter, which refuses it too, would hide the answer. */
static int is_sealed(int namespace)
{
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		if (setns(namespace, CLONE_NEWUSER))
			_exit(2);
		_exit(unshare(CLONE_NEWUSER) < 0 && errno == ENOSPC ? 0 : 1);
	}
	while (pid > 0 && waitpid(pid, &status, 0) != pid)
		if (errno != EINTR)
			return 0;
	return pid > 0 && status == 0;
}

/* Tells the supervisor of the sandbox: who is in it, by what the helper said, and its namespaces. */
static const char *announce(const struct visit *visit, int socket)
{
	struct reply born = {.kind = REPLY_BORN, .status = (uint32_t)visit->gate};
	int shown[8] = {(int)syscall(SYS_pidfd_open, getpid(), 0), -1, -1, -1, -1, -1, -1, -1};
	if (shown[0] < 0)
		return "pidfd";
	int gate = (int)syscall(SYS_pidfd_open, visit->gate, 0);
	if (gate < 0)
		return "pidfd";
	/* It said so before it started the gate, which has spoken. */
	fcntl(visit->status, F_SETFL, O_NONBLOCK);
	ssize_t got = read(visit->status, born.text, sizeof born.text - 1);
	born.text[got > 0 ? got : 0] = '\0';
	for (unsigned i = 1; i < 8; i++) {
		shown[i] = namespace_of(visit->gate, gate, i - 1);
		if (shown[i] < 0)
			return "namespaces";
	}
	if (!is_sealed(shown[1])) {
		errno = ENODATA;
		return "a user namespace that must be refused";
	}
	uint32_t word = 0;
	if (send_reply(socket, &born, shown, 8) || send_message(visit->word, &word, sizeof word, NULL, 0))
		return "word";
	for (unsigned i = 0; i < 8; i++)
		close(shown[i]);
	close(gate);
	return NULL;
}

/* Until the helper has ended, and everything with it. */
static _Noreturn void stay(struct visit *visit)
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
			deadline = now_ms() + GRACE_MS + MORE_MS;
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
static int leave_host(void)
{
	if (geteuid() != 0)
		return 0;
	return unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ? -1 : 0;
}

void usher_main(struct box *box, int plan_file, const char *sabotage)
{
	static int held[MAX_DESCRIPTORS + PLAN_MAX_OPS + HELD_FIRST];
	const struct plan *plan = &box->plan;
	unsigned count = HELD_FIRST - HELD_SOCKET, helper = 0;
	int status[2], words[2], word[2], yes = 1;
	const char *culprit = "";
	prctl(PR_SET_NAME, "stockade-usher");
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	setsid();
	/* What the gate or the helper leaves becomes ours, so that we end after it. */
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
		refuse(box->socket, 0, OP_HELPER, errno, "subreaper");
	if (leave_host())
		refuse(box->socket, 0, OP_NAMESPACES, errno, "mounts");
	for (unsigned i = 0; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		int found[2] = {-1, -1};
		if (op->type == OP_HELPER)
			helper = i;
		if (op->type == OP_KEYRING && !sabotaged_op(i)) {
			long before = session_keyring();
			if (wall_keyring() || session_keyring() == before)
				refuse(box->socket, i, op->type, errno, "replace");
		}
		if (needs(op) && obtain(box, op, found, &culprit))
			refuse(box->socket, i, op->type, errno, culprit);
		if (needs(op) && count + 2 > sizeof held / sizeof *held)
			refuse(box->socket, i, op->type, E2BIG, culprit);
		for (unsigned part = 0; part < needs(op); part++)
			held[count++] = found[part];
	}
	const char *path = (const char *)plan->ops[helper].blob;
	size_t skip = strlen(path) + 1;
	int gate = open("/proc/self/exe", O_PATH | O_CLOEXEC);
	int arguments = in_memory(path + skip, plan->ops[helper].b - skip);
	if (gate < 0 || arguments < 0 || pipe2(status, O_CLOEXEC) || pipe2(words, O_CLOEXEC) ||
	    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, word) ||
	    setsockopt(word[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes))
		refuse(box->socket, helper, OP_HELPER, errno, "descriptors");
	const int first[] = {box->socket, plan_file, box->supervisor, gate, word[1], arguments, status[1]};
	memcpy(held, first, sizeof first);
	pid_t usher = getpid(), pid = fork();
	if (pid == 0)
		become_helper(path, held, count, words[1], box->mask, sabotage, usher);
	int pidfd = pid < 0 ? -1 : (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0) {
		int error = errno;
		if (pid > 0)
			kill(pid, SIGKILL);
		refuse(box->socket, helper, OP_HELPER, error, "start");
	}
	struct visit visit = {.helper = pid,
			      .pidfd = pidfd,
			      .word = word[0],
			      .status = status[0],
			      .words = words[0],
			      .supervisor = box->supervisor};
	close(word[1]);
	close(status[1]);
	close(words[1]);
	for (unsigned i = HELD_FIRST - HELD_SOCKET; i < count; i++)
		close(held[i]);
	for (unsigned i = 0; i < box->descriptor_count; i++)
		close(box->descriptors[i]);
	if (await_gate(&visit, box->socket)) {
		end_all(&visit);
		char said[200];
		last_words(visit.words, said, sizeof said);
		refuse(box->socket, helper, OP_HELPER, 0, said);
	}
	if ((culprit = announce(&visit, box->socket))) {
		int error = errno;
		end_all(&visit);
		refuse(box->socket, helper, OP_NAMESPACES, error, culprit);
	}
	close(box->socket);
	close(visit.word);
	visit.word = -1;
	close(visit.words);
	close(visit.status);
	stay(&visit);
}

/* The gate, as the helper has started it: behind the filter already, without a capability, in the new root. */
void helped_main(int argc, char **argv)
{
	static struct box box;
	static int descriptors[MAX_DESCRIPTORS];
	unsigned char *bytes;
	size_t size;
	struct plan_error wrong;
	uint32_t word = 0;
	(void)argc;
	box = (struct box){.socket = HELD_SOCKET,
			   .supervisor = HELD_SUPERVISOR,
			   .word = HELD_WORD,
			   .descriptors = descriptors,
			   .mask = (unsigned)strtoul(argv[2], NULL, 10),
			   .root = -1,
			   .upper = -1,
			   .image = -1,
			   .base = -1,
			   .canary = HELD_GATE,
			   .outsider = -1,
			   .ruleset = -1,
			   .inner = -1,
			   .told = -1,
			   .helped = 1};
	prctl(PR_SET_NAME, "stockade-gate"); /* not the number of the descriptor that we were executed by */
	umask(0);
	for (int i = HELD_SOCKET; i <= HELD_WORD; i++)
		fcntl(i, F_SETFD, FD_CLOEXEC);
	close(HELD_ARGUMENTS);
	close(HELD_STATUS);
	dup2(1, 2);
	if (read_whole(HELD_PLAN, PLAN_MAX_SIZE, &bytes, &size) ||
	    plan_decode(bytes, size, MAX_DESCRIPTORS, &box.plan, &wrong) || !plan_is_helped(box.plan.ops))
		_exit(1);
	close(HELD_PLAN);
	/* Before anything is opened: the helper has closed some of what it was given. */
	for (unsigned i = 0; i < box.plan.count; i++)
		for (unsigned part = 0; part < needs(&box.plan.ops[i]); part++) {
			int number = held_number(&box.plan, i) + (int)part;
			if (!is_kept(&box.plan.ops[i], part))
				close(number);
			else if (fcntl(number, F_SETFD, FD_CLOEXEC))
				_exit(1);
			if (box.plan.ops[i].type == OP_CGROUP)
				descriptors[box.plan.ops[i].b - 1] = number;
		}
	/* What only we can see of it: that it takes us with it when it dies, and has given us a session. */
	int with_parent = 0;
	if (prctl(PR_GET_PDEATHSIG, &with_parent) || with_parent != SIGKILL)
		box.problem = "--die-with-parent";
	else if (getsid(0) != getpid())
		box.problem = "--new-session";
	box.problem_error = ENODATA;
	box.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (box.root < 0 || send_message(HELD_WORD, &word, sizeof word, NULL, 0))
		_exit(1);
	inside_main(&box);
}
