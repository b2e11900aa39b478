/* What init does behind the walls: starts programs on request, looks after their keepers, and ends the sandbox. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* A long body, three streams and those after them, the socket of a run and the entrance of a cgroup. */
enum { EXEC_DESCRIPTORS = 6 + EXEC_MORE_MOST };

/* Whether no process but init is inside: every other one descends from a child of init, which may have ended. */
static int is_empty(const struct runs *runs)
{
	siginfo_t info;
	return getpid() == 1 && !runs->beside &&
	       waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) < 0 && errno == ECHILD;
}

/* A run with a keeper, which adopts whatever the program's processes leave, so that all of them can be found and
 * ended while the rest of the sandbox goes on. */
static void start_kept(struct runs *runs, struct program *program, int children)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .error = EAGAIN, .text = "too many runs"};
	if (runs->kept == MAX_RUNS) {
		send_reply(program->socket, &reply, NULL, 0);
		return;
	}
	runs->kept++;
	/* A clone child: it says with another signal that it has ended, and is waited for only on request. */
	pid_t gate = getpid(), pid = guard_share(runs) ? -1 : (pid_t)syscall(SYS_clone, KEEPER_ENDED, 0, 0, 0, 0);
	if (pid == 0) {
		close(runs->launch->socket);
		publish_close();
		if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) || (runs->plain && scope_signals(gate)))
			_exit(1);
		attend(runs, program, children, 0);
	}
	if (pid > 0) {
		runs->keepers[runs->kept - 1] = pid;
		return;
	}
	reply.error = errno;
	snprintf(reply.text, sizeof reply.text, "keeper");
	runs->kept--;
	send_reply(program->socket, &reply, NULL, 0);
}

/* A request with what follows it. */
struct message {
	struct request request;
	unsigned char body[EXEC_SHORT];
	size_t size; /* of the body */
};

/* A program that goes on in a copy of this memory finds no body but its own. */
static int take_body(struct program *program, struct message *message)
{
	program->size = message->size;
	program->bytes = malloc(message->size);
	if (program->bytes)
		memcpy(program->bytes, message->body, message->size);
	wipe(message->body, message->size);
	return program->bytes ? 0 : -1;
}

static void start(struct runs *runs, struct message *message, int *descriptors, unsigned count, int children)
{
	const struct request *request = &message->request;
	int is_long = (request->flags & EXEC_LONG) != 0;
	unsigned next = is_long ? 1 : 0;
	int kept = (request->flags & EXEC_KEPT) != 0, enters = (request->flags & EXEC_ENTER) != 0;
	int first = (request->flags & EXEC_FIRST) != 0, terminal = (request->flags & EXEC_TERMINAL) != 0;
	int awaited = kept && (request->flags & EXEC_AWAITED);
	static const uint32_t apart[3] = {0, EXEC_STDOUT, EXEC_STDERR};
	struct program program = {
	    .request = *request, .socket = runs->launch->socket, .entrance = -1, .stdio = {-1, -1, -1}};
	for (unsigned i = 0; i < 3; i++)
		if (next < count && (!terminal || (request->flags & apart[i])))
			program.stdio[i] = descriptors[next++];
	program.more = &descriptors[next];
	program.extra = request->flags >> EXEC_MORE_AT;
	if (program.extra > EXEC_MORE_MOST)
		_exit(1);
	next += program.extra;
	if (count != next + (unsigned)(kept + enters) || (first && (!kept || terminal)))
		_exit(1);
	int *socket = &descriptors[next];
	if (kept)
		program.socket = descriptors[next++];
	if (enters)
		program.entrance = descriptors[next];
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .text = "request"};
	int refused = (is_long ? read_whole(descriptors[0], EXEC_MAX_SIZE, &program.bytes, &program.size)
			       : take_body(&program, message)) ||
		      program_decode(&program);
	reply.error = errno;
	if (is_long)
		close_fd(&descriptors[0]);
	if (!refused && first && (runs->started || getpid() != 1)) {
		refused = 1;
		reply.error = EBUSY;
		snprintf(reply.text, sizeof reply.text, "first");
	}
	runs->started |= !refused;
	if (!refused && kept && guard_spent()) {
		refused = 1;
		reply = (struct reply){.kind = REPLY_EXITED, .status = SIGKILL, .ended = ENDED_BY_CPU};
	}
	if (refused) {
		send_reply(program.socket, &reply, NULL, 0);
	} else if (first || (awaited && !terminal && is_empty(runs))) {
		beside_begin(runs, &program);
		*socket = -1;
	} else if (kept) {
		start_kept(runs, &program, children);
	} else {
		attend(runs, &program, children, 1);
	}
	program_free(&program);
}

/* The sandbox's root, and the overlay for itself: the root's mounts go with init, a mount that the
 * supervisor holds does not. */
static void show_roots(const struct runs *runs)
{
	struct reply reply = {.kind = REPLY_ROOTS};
	int roots[2] = {sys_open("/", O_PATH | O_DIRECTORY), -1};
	unsigned count = 1;
	const struct plan *plan = &runs->launch->plan;
	for (unsigned i = plan->base + 1; i < plan->count; i++)
		if (plan->ops[i].type == OP_OVERLAY && count == 1)
			roots[count++] = sys_open(plan->ops[i].s[0], O_PATH | O_DIRECTORY | O_NOFOLLOW);
	/* Without namespaces that is the host's root. */
	if (runs->plain || roots[0] < 0 || (count == 2 && roots[1] < 0))
		count = 0;
	send_reply(runs->launch->socket, &reply, roots, count);
	close_fds(roots, 2);
}

/* A run whose keeper was killed or stopped can no longer be ended for itself: then everything is. */
static void reap(struct runs *runs)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | __WCLONE)) > 0) {
		for (unsigned i = 0; i < runs->kept; i++) {
			if (runs->keepers[i] != pid)
				continue;
			if (!WIFEXITED(status) || WEXITSTATUS(status))
				kill(-1, SIGKILL);
			if (!WIFSTOPPED(status))
				runs->keepers[i] = runs->keepers[--runs->kept];
			break;
		}
	}
}

/* The supervisor is gone, or ends the sandbox: programs may tidy up for a moment. */
static _Noreturn void end_sandbox(struct runs *runs, int children)
{
	uint64_t deadline = now_ms() + GRACE_MS;
	kill(-1, SIGTERM);
	kill(-1, SIGCONT);
	for (;;) {
		beside_socket(runs); /* reports its end */
		while (waitpid(-1, NULL, WNOHANG | __WALL) > 0)
			;
		uint64_t now = now_ms();
		if (now >= deadline || (waitpid(-1, NULL, WNOHANG | __WALL) < 0 && errno == ECHILD)) {
			kill(-1, SIGKILL); /* without a pid namespace the kernel does not do it when init ends */
			_exit(0);
		}
		struct pollfd ended = {children, POLLIN, 0};
		poll(&ended, 1, (int)(deadline - now));
		asked_to_end(children);
	}
}

void serve_supervisor(struct runs *runs, int children)
{
	static struct message message;
	const struct request *request = &message.request;
	const struct launch *launch = runs->launch;
	struct pollfd watched[6 + GUARD_POLLS] = {
	    {launch->socket, POLLIN, 0}, {launch->supervisor, POLLIN, 0}, {children, POLLIN, 0}, {runs->from_warden, POLLIN, 0}};
	for (;;) {
		watched[4] = (struct pollfd){beside_socket(runs), POLLIN, 0};
		watched[5] = publish_poll();
		guard_polls(watched + 6);
		if (poll(watched, 6 + GUARD_POLLS, guard_timeout(beside_timeout(runs))) < 0 && errno != EINTR)
			_exit(1);
		if (watched[1].revents || warden_asks_end(runs->from_warden, watched[3].revents))
			end_sandbox(runs, children);
		if (watched[2].revents) {
			if (asked_to_end(children))
				end_sandbox(runs, children);
			reap(runs);
		}
		if (guard_check(runs, watched + 6))
			signal_descendants(runs, SIGKILL, KEEPERS);
		publish_handle(watched[5].revents);
		beside_handle(runs, watched[4].revents);
		if (!watched[0].revents)
			continue;
		int descriptors[EXEC_DESCRIPTORS];
		unsigned count = EXEC_DESCRIPTORS;
		message.size = sizeof message.body;
		int got = receive_more(launch->socket, &message, sizeof *request, &message.size, descriptors, &count);
		if (got == 0)
			end_sandbox(runs, children);
		if (got < 0 || (message.size && request->kind != REQUEST_EXEC))
			_exit(1);
		if (request->kind == REQUEST_SERVE && count == 1) {
			publish_open(&launch->plan, descriptors[0]);
			continue;
		}
		if (request->kind == REQUEST_EXEC)
			start(runs, &message, descriptors, count, children);
		else if (request->kind == REQUEST_SIGNAL && count == 0)
			signal_descendants(runs, (int)request->value, KEEPERS);
		else if (request->kind == REQUEST_ROOTS && count == 0)
			show_roots(runs);
		else if (request->kind == REQUEST_WATCH && guard_watch(request, descriptors, count) == 0)
			continue;
		else
			_exit(request->kind != REQUEST_END);
		/* Closed, it tells the resident that this start is over and that its idle work disturbs no program. */
		close_fd(&runs->to_resident);
		close_fds(descriptors, count);
	}
}
