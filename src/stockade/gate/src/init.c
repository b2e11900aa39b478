/* The sandbox's first process: raises the walls on itself, then serves its supervisor. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

static void await_launch(struct init *init);

static _Noreturn void refuse(struct init *init, unsigned index, uint32_t op, int error, const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text ? text : "");
	/* A spare has no socket to the supervisor before its launch. */
	if (init->launch.socket < 0)
		await_launch(init);
	send_reply(init->launch.socket, &reply, NULL, 0);
	_exit(1);
}

static void tell_ready(const struct init *init)
{
	struct reply reply = {.kind = REPLY_READY, .index = init->walls.rules};
	memcpy(reply.text, init->walls.filter, sizeof init->walls.filter);
	if (send_reply(init->launch.socket, &reply, NULL, 0))
		_exit(1);
}

/* Init enters by itself, so that the warden is not counted. */
static int enter_group(int directory)
{
	owned_fd processes = openat(directory, "cgroup.procs", O_WRONLY | O_CLOEXEC);
	return processes >= 0 && write(processes, "0", 1) == 1 ? 0 : -1;
}

/* What a helper has done, and the usher before it. */
static int helper_does(const struct walls *walls, const struct op *op)
{
	switch (op->type) {
	case OP_CGROUP:
	case OP_RLIMIT:
	case OP_PRIVILEGES:
	case OP_LANDLOCK:
	case OP_GRANT:
	case OP_PORT:
		return 0;
	}
	return walls->helped;
}

static int enter_cgroup(const struct init *init, const struct op *op)
{
	int passed = init->launch.descriptors[op->b - 1];
	if (op->a == 2 && !init->walls.helped)
		return init->walls.warden ? enter_group(passed) : 0; /* init was born there */
	return write(passed, "0", 1) == 1 ? 0 : -1;
}

static int execute(struct init *init, const struct op *op, const char **culprit)
{
	*culprit = op->s[0];
	if (helper_does(&init->walls, op))
		return 0;
	switch (op->type) {
	case OP_CGROUP:
		*culprit = "enter";
		return enter_cgroup(init, op);
	case OP_HOSTNAME:
		return sethostname(op->s[0], strlen(op->s[0]));
	case OP_ROOT:
		return mount_root(&init->tree, op);
	case OP_IMAGE:
		*culprit = "attach";
		return mount_image(&init->tree, op);
	case OP_PIVOT:
		return mount_pivot(&init->tree);
	case OP_KEYRING:
		return wall_keyring();
	case OP_RLIMIT:
		/* The gate keeps room for itself, so that a program that has used up every task
		 * cannot keep it from starting another. */
		return set_limit(op, GRACE_TASKS);
	case OP_PRIVILEGES:
		return wall_privileges(&init->walls, op->a);
	case OP_LANDLOCK:
		return wall_landlock_begin(&init->walls, &init->launch.plan, op);
	case OP_GRANT:
		return wall_landlock_grant(&init->walls, init->launch.descriptors, op);
	case OP_PORT:
		return wall_landlock_port(&init->walls, op);
	case OP_OBSERVE:
		*culprit = "observer";
		return observer_start(op);
	case OP_SECCOMP:
		*culprit = "install";
		return wall_seccomp(&init->walls, op);
	}
	return mount_op(&init->tree, op, culprit);
}

/* Waits for the resident: without a word there is nothing to do. */
static unsigned await_word(int to_resident, int *descriptors, unsigned room)
{
	uint32_t word;
	unsigned count = room;
	if (receive(to_resident, &word, sizeof word, descriptors, &count) != 1)
		_exit(1);
	return count;
}

/* The launch, with its plan. The resident has decoded it already, and refused what is none. */
static void await_launch(struct init *init)
{
	static int descriptors[MAX_DESCRIPTORS + LAUNCH_FIRST];
	struct launch *launch = &init->launch;
	unsigned count = await_word(init->runs.to_resident, descriptors, MAX_DESCRIPTORS + LAUNCH_FIRST);
	unsigned char *bytes;
	size_t size;
	struct plan_error wrong;
	launch->socket = descriptors[LAUNCH_SOCKET];
	launch->supervisor = descriptors[LAUNCH_SUPERVISOR];
	launch->descriptors = init->tree.descriptors = descriptors + LAUNCH_FIRST;
	launch->descriptor_count = count - LAUNCH_FIRST;
	if (read_whole(descriptors[LAUNCH_PLAN], PLAN_MAX_SIZE, &bytes, &size))
		refuse(init, 0, 0, errno, "read");
	launch->plan_bytes = bytes;
	launch->plan_size = size;
	close(descriptors[LAUNCH_PLAN]);
	if (plan_decode(bytes, size, launch->descriptor_count, &launch->plan, &wrong))
		refuse(init, wrong.index, 0, EBADMSG, wrong.reason);
	await_word(init->runs.to_resident, NULL, 0); /* until the supervisor knows this pid: it ignores whatever comes before */
}

/* Compares what the helper shows with what the supervisor judged: a helper shows directories by their paths, which
 * could have led elsewhere meanwhile. */
static void confirm_helper_mounts(struct init *init)
{
	const struct plan *plan = &init->launch.plan;
	for (unsigned i = 0; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		int held = held_number(plan, i);
		if ((op->type == OP_VIEW || op->type == OP_OVERLAY) &&
		    confirm_shown(op->s[0], held, op->type == OP_OVERLAY ? held + 1 : -1))
			refuse(init, i, op->type, errno, op->s[0]);
		if (op->type == OP_BIND && confirm_bound(op->s[0], held + 1))
			refuse(init, i, op->type, errno, op->s[0]);
	}
}

static void run(struct init *init, unsigned index)
{
	const char *culprit;
	const struct op *op = &init->launch.plan.ops[index];
	if (!sabotaged_op(index) && execute(init, op, &culprit))
		refuse(init, index, op->type, errno, culprit);
}

/* The first operation of those that come last, whatever else waits: the observer, if there is one, and the filter. The
 * decoder saw to the order. */
static unsigned last_walls(const struct plan *plan)
{
	unsigned filter = plan->count - 1;
	return filter && plan->ops[filter - 1].type == OP_OBSERVE ? filter - 1 : filter;
}

/* A second look, either at what waits for the launch or at everything else. */
static void confirm_again(struct init *init, int waits)
{
	const char *culprit;
	const struct plan *plan = &init->launch.plan;
	for (unsigned i = plan->base + 1; i < plan->count - 1; i++) {
		const struct op *op = &plan->ops[i];
		if (plan_waits(op) == waits &&
		    (confirm_tree(&init->tree, op, &culprit) || confirm_op(&init->walls, op, &culprit)))
			refuse(init, i, op->type, errno, culprit);
	}
}

/* What comes last: Landlock, which hangs on what is mounted, the second look, and the filter. */
static void finish_walls(struct init *init)
{
	const char *culprit;
	const struct launch *launch = &init->launch;
	struct walls *walls = &init->walls;
	struct tree *tree = &init->tree;
	unsigned last = launch->plan.count - 1;
	if (walls->ruleset >= 0 && wall_landlock_enforce(walls))
		refuse(init, last, OP_LANDLOCK, errno, "enforce");
	if (walls->warden)
		for (unsigned d = 0; d < launch->descriptor_count; d++)
			close(launch->descriptors[d]);
	confirm_again(init, 0);
	if (confirm_walls(walls, &launch->plan, tree->canary, &culprit))
		refuse(init, last, OP_LANDLOCK, errno, culprit);
	for (unsigned i = last_walls(&launch->plan); i <= last; i++)
		run(init, i);
	if (confirm_seccomp())
		refuse(init, last, OP_SECCOMP, errno, "a call that the filter must refuse");
	if (confirm_inner(walls))
		refuse(init, last, OP_LANDLOCK, errno, "what programs must not reach");
	close_fd(&tree->root);
	close_fd(&tree->image);
	close_fd(&tree->base);
	close_fd(&tree->canary);
	close_fd(&walls->outsider);
	close_fd(&walls->ruleset);
	init->runs.inner = walls->inner;
	if (guard_open(&init->runs))
		refuse(init, 0, 0, errno, "guard");
}

/* What the plan begins with and any launch of its kind would need. */
static void execute_ahead(struct init *init)
{
	const struct plan *plan = &init->launch.plan;
	unsigned last = last_walls(plan);
	for (unsigned i = plan->base + 1; i < init->ahead && i < last; i++)
		if (!plan_waits(&plan->ops[i]))
			run(init, i);
	if (init->ahead > last)
		finish_walls(init);
	else
		/* Of the privileges the part that takes longest: nothing before their turn needs it. */
		init->walls.bounded = wall_bounds(plan_keeps(plan)) == 0;
}

static void raise_walls(struct init *init)
{
	const struct launch *launch = &init->launch;
	const struct plan *plan = &launch->plan;
	unsigned last = last_walls(plan);
	if (observer_map(launch))
		refuse(init, last, OP_OBSERVE, errno, "memory");
	if (init->walls.helped)
		confirm_helper_mounts(init);
	for (unsigned i = plan->base + 1; i < last; i++) {
		if (i >= init->ahead || plan_waits(&plan->ops[i]))
			run(init, i);
		/* No operation after this one mounts anything: the decoder saw to that as well. The
		 * supervisor can read the mounts while init goes on. */
		if (plan->ops[i].type == OP_PIVOT) {
			for (unsigned d = 0; d < launch->descriptor_count; d++)
				close(launch->descriptors[d]);
			if (init->walls.helped)
				held_close(plan);
			struct reply mounted = {.kind = REPLY_MOUNTED};
			if (send_reply(launch->socket, &mounted, init->tree.uppers, init->tree.overlays))
				_exit(1);
			close_fds(init->tree.uppers, init->tree.overlays);
			init->tree.overlays = 0;
		}
	}
	if (init->ahead <= last)
		finish_walls(init);
	confirm_again(init, 1);
}

void init_main(struct init *init)
{
	init->runs.launch = &init->launch;
	init->runs.inner = -1;
	if (init->ahead)
		prctl(PR_SET_NAME, "stockade-spare");
	/* SIGTERM is heard only where it comes from outside: `asked_to_end`; where that cannot be seen, never. */
	sigset_t heard;
	sigemptyset(&heard);
	sigaddset(&heard, SIGCHLD);
	sigaddset(&heard, KEEPER_ENDED);
	sigaddset(&heard, SIGTERM);
	sigprocmask(SIG_BLOCK, &heard, NULL);
	if (init->runs.plain)
		sigdelset(&heard, SIGTERM);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);

	await_word(init->runs.to_resident, NULL, 0); /* until the resident has mapped the ids */
	int signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK), error = errno;
	setsid();
	if (!init->walls.helped)
		init->walls.keyring = session_keyring();
	if (init->ahead)
		execute_ahead(init);
	if (!init->walls.helped)
		await_launch(init);
	if (init->problem)
		refuse(init, 0, init->walls.helped ? OP_HELPER : OP_NAMESPACES, init->problem_error, init->problem);
	if (signals < 0)
		refuse(init, 0, OP_NAMESPACES, error, "signalfd");
	if (init->ahead)
		prctl(PR_SET_NAME, "stockade-gate");
	raise_walls(init);
	tell_ready(init);
	/* A program that resumes a template is a copy of this memory. */
	wipe(&init->tree, sizeof init->tree);
	wipe(&init->walls, sizeof init->walls);
	serve_supervisor(&init->runs, signals);
	_exit(0);
}
