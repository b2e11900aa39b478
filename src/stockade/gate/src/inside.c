/* The sandbox's first process: raises the walls on itself, then starts programs on request. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* The body, three streams and two more, the socket of a keeper and the entrance of a cgroup. */
enum { EXEC_DESCRIPTORS = 8 };

enum { KEEPER_ENDED = SIGUSR1 };

static void await_launch(struct box *box);

static _Noreturn void refuse(struct box *box, unsigned index, uint32_t op, int error, const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text ? text : "");
	/* Made ahead, we have nobody to tell before our launch. */
	if (box->socket < 0)
		await_launch(box);
	send_reply(box->socket, &reply, NULL, 0);
	_exit(1);
}

static void tell_ready(const struct box *box)
{
	struct reply reply = {.kind = REPLY_READY, .index = box->rules};
	memcpy(reply.text, box->filter, sizeof box->filter);
	if (send_reply(box->socket, &reply, NULL, 0))
		_exit(1);
}

/* The warden stays outside, so that it counts for nothing. */
static int enter_group(int directory)
{
	int processes = openat(directory, "cgroup.procs", O_WRONLY | O_CLOEXEC);
	if (processes < 0)
		return -1;
	ssize_t wrote = write(processes, "0", 1);
	int error = errno;
	close(processes);
	errno = error;
	return wrote == 1 ? 0 : -1;
}

/* What a helper has done, and the usher before it. */
static int is_done(const struct box *box, const struct op *op)
{
	switch (op->type) {
	case OP_CGROUP:
	case OP_RLIMIT:
	case OP_PRIVILEGES:
	case OP_LANDLOCK:
	case OP_GRANT:
		return 0;
	}
	return box->helped;
}

static int execute(struct box *box, const struct op *op, const char **culprit)
{
	*culprit = op->s[0];
	if (is_done(box, op))
		return 0;
	switch (op->type) {
	case OP_CGROUP:
		*culprit = "enter";
		if (box->helped)
			return write(box->descriptors[op->b - 1], "0", 1) == 1 ? 0 : -1;
		if (op->a == 2 && box->warden)
			return enter_group(box->descriptors[op->b - 1]);
		/* In version 2 we were born there. */
		return op->a == 2 || write(box->descriptors[op->b - 1], "0", 1) == 1 ? 0 : -1;
	case OP_HOSTNAME:
		return sethostname(op->s[0], strlen(op->s[0]));
	case OP_ROOT:
		return mount_root(box, op);
	case OP_IMAGE:
		*culprit = "attach";
		return mount_image(box, op);
	case OP_PIVOT:
		return mount_pivot(box);
	case OP_KEYRING:
		return wall_keyring();
	case OP_RLIMIT:
		/* The gate keeps room for itself, so that a program that has used up every task
		 * cannot keep it from starting another. */
		return set_limit(op, GRACE_TASKS);
	case OP_PRIVILEGES:
		return wall_privileges(box);
	case OP_LANDLOCK:
		return wall_landlock_begin(box, op);
	case OP_GRANT:
		return wall_landlock_grant(box, op);
	case OP_SECCOMP:
		*culprit = "install";
		return wall_seccomp(box, op);
	}
	return mount_op(box, op, culprit);
}

/* Waits for the resident: without a word there is nothing to do. */
static unsigned await(const struct box *box, int *descriptors, unsigned room)
{
	uint32_t word;
	unsigned count = room;
	if (receive(box->word, &word, sizeof word, descriptors, &count) != 1)
		_exit(1);
	return count;
}

/* The launch, with its plan. The resident has decoded it already, and refused what is none. */
static void await_launch(struct box *box)
{
	static int descriptors[MAX_DESCRIPTORS + LAUNCH_FIRST];
	unsigned count = await(box, descriptors, MAX_DESCRIPTORS + LAUNCH_FIRST);
	unsigned char *bytes;
	size_t size;
	struct plan_error wrong;
	box->socket = descriptors[LAUNCH_SOCKET];
	box->supervisor = descriptors[LAUNCH_SUPERVISOR];
	box->descriptors = descriptors + LAUNCH_FIRST;
	box->descriptor_count = count - LAUNCH_FIRST;
	if (read_whole(descriptors[LAUNCH_PLAN], PLAN_MAX_SIZE, &bytes, &size))
		refuse(box, 0, 0, errno, "read");
	box->plan_bytes = bytes;
	box->plan_size = size;
	close(descriptors[LAUNCH_PLAN]);
	if (plan_decode(bytes, size, box->descriptor_count, &box->plan, &wrong))
		refuse(box, wrong.index, 0, EBADMSG, wrong.reason);
	await(box, NULL, 0); /* until the supervisor has been told of us: it hears of nothing before that */
}

/* Is it what was judged? A helper shows directories by their paths, which could have led elsewhere meanwhile; of
 * what it binds it says that it has looked. */
static void look_at_shown(struct box *box)
{
	for (unsigned i = 0; i < box->plan.count; i++) {
		const struct op *op = &box->plan.ops[i];
		int held = held_number(&box->plan, i);
		if ((op->type == OP_VIEW || op->type == OP_OVERLAY) &&
		    confirm_shown(op->s[0], held, op->type == OP_OVERLAY ? held + 1 : -1))
			refuse(box, i, op->type, errno, op->s[0]);
		if (op->type == OP_BIND && confirm_bound(op->s[0], held + 1))
			refuse(box, i, op->type, errno, op->s[0]);
	}
}

static void run(struct box *box, unsigned index)
{
	const char *culprit;
	if (!sabotaged_op(index) && execute(box, &box->plan.ops[index], &culprit))
		refuse(box, index, box->plan.ops[index].type, errno, culprit);
}

/* A second look, either at what waits for the launch or at everything else. */
static void look_again(struct box *box, int waits)
{
	const char *culprit;
	for (unsigned i = box->plan.base + 1; i < box->plan.count - 1; i++)
		if (plan_waits(&box->plan.ops[i]) == waits && confirm_op(box, &box->plan.ops[i], &culprit))
			refuse(box, i, box->plan.ops[i].type, errno, culprit);
}

/* What comes last: Landlock, which hangs on what is mounted, the second look, and the filter. */
static void close_in(struct box *box)
{
	const char *culprit;
	unsigned last = box->plan.count - 1; /* the filter: the decoder saw to that */
	if (box->ruleset >= 0 && wall_landlock_enforce(box))
		refuse(box, last, OP_LANDLOCK, errno, "enforce");
	if (box->warden)
		for (unsigned d = 0; d < box->descriptor_count; d++)
			close(box->descriptors[d]);
	look_again(box, 0);
	if (confirm_walls(box, &culprit))
		refuse(box, last, OP_LANDLOCK, errno, culprit);
	run(box, last);
	if (confirm_seccomp())
		refuse(box, last, OP_SECCOMP, errno, "a call that the filter must refuse");
	if (confirm_inner(box))
		refuse(box, last, OP_LANDLOCK, errno, "what programs must not reach");
	close(box->root);
	close(box->image);
	close(box->base);
	close(box->canary);
	close(box->outsider);
	close(box->ruleset);
	if (guard_open(box))
		refuse(box, 0, 0, errno, "guard");
}

/* What the plan begins with and any launch of its kind would need. */
static void prepare(struct box *box)
{
	unsigned last = box->plan.count - 1;
	for (unsigned i = box->plan.base + 1; i < box->ahead && i < last; i++)
		if (!plan_waits(&box->plan.ops[i]))
			run(box, i);
	if (box->ahead > last)
		close_in(box);
	else
		/* Of the privileges the part that takes longest: nothing before their turn needs it. */
		box->bounded = wall_bounds() == 0;
}

static void raise_walls(struct box *box)
{
	const struct plan *plan = &box->plan;
	unsigned last = plan->count - 1;
	if (box->helped)
		look_at_shown(box);
	for (unsigned i = plan->base + 1; i < last; i++) {
		if (i >= box->ahead || plan_waits(&plan->ops[i]))
			run(box, i);
		/* No operation after this one mounts anything: the decoder saw to that as well. The
		 * supervisor can read the mounts while we go on. */
		if (plan->ops[i].type == OP_PIVOT) {
			for (unsigned d = 0; d < box->descriptor_count; d++)
				close(box->descriptors[d]);
			if (box->helped)
				held_close(plan);
			struct reply mounted = {.kind = REPLY_MOUNTED};
			if (send_reply(box->socket, &mounted, &box->upper, box->upper >= 0))
				_exit(1);
			close(box->upper);
		}
	}
	if (box->ahead <= last)
		close_in(box);
	look_again(box, 1);
}

/* A kept run: its keeper adopts whatever the program's processes leave, so that all of them can be found
 * and ended while the rest of the sandbox goes on. */
static void start_kept(struct box *box, struct program *program, int children)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .error = EAGAIN, .text = "too many runs"};
	struct reply over = {.kind = REPLY_EXITED, .status = SIGKILL, .ended = ENDED_BY_CPU};
	if (guard_spent()) {
		send_reply(program->socket, &over, NULL, 0);
		return;
	}
	if (box->kept == MAX_RUNS) {
		send_reply(program->socket, &reply, NULL, 0);
		return;
	}
	box->kept++;
	/* A clone child: it says with another signal that it has ended, and is waited for only on request. */
	pid_t gate = getpid(), pid = guard_share(box) ? -1 : (pid_t)syscall(SYS_clone, KEEPER_ENDED, 0, 0, 0, 0);
	if (pid == 0) {
		close(box->socket);
		if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) || (box->warden && keep_signals_in(gate)))
			_exit(1);
		attend(box, program, children, 0);
	}
	if (pid > 0) {
		box->keepers[box->kept - 1] = pid;
		return;
	}
	reply.error = errno;
	snprintf(reply.text, sizeof reply.text, "keeper");
	box->kept--;
	send_reply(program->socket, &reply, NULL, 0);
}

static void start(struct box *box, const struct request *request, int *descriptors, unsigned count,
		  int children)
{
	unsigned next = 1;
	int kept = (request->flags & EXEC_KEPT) != 0, enters = (request->flags & EXEC_ENTER) != 0;
	int first = (request->flags & EXEC_FIRST) != 0;
	static const uint32_t apart[3] = {0, EXEC_STDOUT, EXEC_STDERR};
	struct program program = {
	    .request = *request, .socket = box->socket, .entrance = -1, .stdio = {-1, -1, -1}, .more = {-1, -1}};
	for (unsigned i = 0; i < 3; i++)
		if (next < count && (!(request->flags & EXEC_TERMINAL) || (request->flags & apart[i])))
			program.stdio[i] = descriptors[next++];
	for (unsigned i = 0; i < 2 && next < count && (request->flags & EXEC_MORE); i++)
		program.more[i] = descriptors[next++];
	if (count != next + (unsigned)(kept + enters) || (first && (!kept || (request->flags & EXEC_TERMINAL))))
		_exit(1);
	int *socket = &descriptors[next];
	if (kept)
		program.socket = descriptors[next++];
	if (enters)
		program.entrance = descriptors[next];
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .text = "request"};
	int refused = program_read(descriptors[0], &program);
	reply.error = errno;
	close(descriptors[0]);
	descriptors[0] = -1;
	if (!refused && first && (box->started || getpid() != 1)) {
		refused = 1;
		reply.error = EBUSY;
		snprintf(reply.text, sizeof reply.text, "first");
	}
	box->started |= !refused;
	if (refused) {
		send_reply(program.socket, &reply, NULL, 0);
	} else if (first) {
		first_begin(box, &program);
		*socket = -1;
	} else if (kept) {
		start_kept(box, &program, children);
	} else {
		attend(box, &program, children, 1);
	}
	program_free(&program);
}

/* The sandbox's root, and the overlay for itself: the root's mounts go with us, a mount that is held does not. */
static void show_roots(const struct box *box)
{
	struct reply reply = {.kind = REPLY_ROOTS};
	int roots[2] = {open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), -1};
	unsigned count = 1;
	for (unsigned i = box->plan.base + 1; i < box->plan.count; i++)
		if (box->plan.ops[i].type == OP_OVERLAY && count == 1)
			roots[count++] = open(box->plan.ops[i].s[0], O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	/* Without namespaces that is the host's root. */
	if (box->warden || roots[0] < 0 || (count == 2 && roots[1] < 0))
		count = 0;
	send_reply(box->socket, &reply, roots, count);
	for (unsigned i = 0; i < 2; i++)
		if (roots[i] >= 0)
			close(roots[i]);
}

/* Whoever ends or stops a keeper takes the means away to end its run: then everything goes. */
static void reap(struct box *box)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | __WCLONE)) > 0) {
		for (unsigned i = 0; i < box->kept; i++) {
			if (box->keepers[i] != pid)
				continue;
			if (!WIFEXITED(status) || WEXITSTATUS(status))
				kill(-1, SIGKILL);
			if (!WIFSTOPPED(status))
				box->keepers[i] = box->keepers[--box->kept];
			break;
		}
	}
}

/* The supervisor is gone, or wants us to go: programs may tidy up for a moment. */
static _Noreturn void leave(int children)
{
	uint64_t deadline = now_ms() + GRACE_MS;
	kill(-1, SIGTERM);
	kill(-1, SIGCONT);
	for (;;) {
		while (waitpid(-1, NULL, WNOHANG | __WALL) > 0)
			;
		uint64_t now = now_ms();
		if (now >= deadline || (waitpid(-1, NULL, WNOHANG | __WALL) < 0 && errno == ECHILD)) {
			kill(-1, SIGKILL); /* where the kernel does not do it when we end */
			_exit(0);
		}
		struct pollfd ended = {children, POLLIN, 0};
		poll(&ended, 1, (int)(deadline - now));
		told_to_end(children);
	}
}

static void serve(struct box *box, int children)
{
	struct pollfd watched[5 + GUARD_POLLS] = {
	    {box->socket, POLLIN, 0}, {box->supervisor, POLLIN, 0}, {children, POLLIN, 0}, {box->told, POLLIN, 0}};
	for (;;) {
		watched[4] = (struct pollfd){first_socket(box), POLLIN, 0};
		guard_polls(watched + 5);
		if (poll(watched, 5 + GUARD_POLLS, guard_patience(first_patience(box))) < 0 && errno != EINTR)
			_exit(1);
		if (watched[1].revents || told_by_warden(box, watched[3].revents))
			leave(children);
		if (watched[2].revents) {
			if (told_to_end(children))
				leave(children);
			reap(box);
		}
		if (guard_check(box, watched + 5))
			signal_descendants(box, SIGKILL, KEEPERS);
		first_hear(box, watched[4].revents);
		if (!watched[0].revents)
			continue;
		struct request request;
		int descriptors[EXEC_DESCRIPTORS];
		unsigned count = EXEC_DESCRIPTORS;
		int got = receive(box->socket, &request, sizeof request, descriptors, &count);
		if (got == 0)
			leave(children);
		if (got < 0)
			_exit(1);
		if (request.kind == REQUEST_EXEC && count)
			start(box, &request, descriptors, count, children);
		else if (request.kind == REQUEST_SIGNAL && count == 0)
			signal_descendants(box, (int)request.value, KEEPERS);
		else if (request.kind == REQUEST_ROOTS && count == 0)
			show_roots(box);
		else if (request.kind == REQUEST_WATCH && guard_watch(&request, descriptors, count) == 0)
			continue;
		else
			_exit(request.kind != REQUEST_END);
		/* Closed, it tells the resident that this start is over and its idle work disturbs nobody. */
		if (box->word >= 0) {
			close(box->word);
			box->word = -1;
		}
		for (unsigned i = 0; i < count; i++)
			close(descriptors[i]);
	}
}

void inside_main(struct box *box)
{
	/* SIGTERM is heard only where it comes from outside: `told_to_end`; where that cannot be seen, never. */
	sigset_t heard;
	sigemptyset(&heard);
	sigaddset(&heard, SIGCHLD);
	sigaddset(&heard, KEEPER_ENDED);
	sigaddset(&heard, SIGTERM);
	sigprocmask(SIG_BLOCK, &heard, NULL);
	if (box->warden)
		sigdelset(&heard, SIGTERM);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);

	await(box, NULL, 0); /* until our ids are mapped */
	int signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK), error = errno;
	setsid();
	if (!box->helped)
		box->keyring = session_keyring();
	if (box->ahead) {
		prctl(PR_SET_NAME, "stockade-spare");
		prepare(box);
	}
	if (!box->helped)
		await_launch(box);
	if (box->problem)
		refuse(box, 0, box->helped ? OP_HELPER : OP_NAMESPACES, box->problem_error, box->problem);
	if (signals < 0)
		refuse(box, 0, OP_NAMESPACES, error, "signalfd");
	if (box->ahead)
		prctl(PR_SET_NAME, "stockade-gate");
	raise_walls(box);
	tell_ready(box);
	serve(box, signals);
	_exit(0);
}
