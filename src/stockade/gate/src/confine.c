/* The walls of a plan without namespaces, on the very process that loads this library, for good.
 *
 * Landlock's rules and the filter are a thread's own, so a process with more than one is refused. What can
 * be undone comes first: the whole plan is decoded and its rules are made. Then a child raises every wall
 * and looks at it, a rehearsal: what would fail halfway fails there. Only then the process does the same to
 * itself. The child stays until that is done: it is what a signal must no longer reach.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Shared with live/confine.py. */
struct confined {
	uint32_t begun; /* whether something was done that cannot be undone */
	uint32_t op, rules;
	int32_t error;
	char filter[SHA256_TEXT], text[128];
};

int gate_confine(const void *bytes, size_t size, const int *descriptors, unsigned count, struct confined *said);

static int failed(struct confined *said, uint32_t op, int error, const char *text)
{
	said->op = op;
	said->error = error ? error : EIO;
	snprintf(said->text, sizeof said->text, "%s", text ? text : "");
	return -1;
}

/* Of the plain operations, those that a process can do to itself and that leave nobody else in charge. */
static int fits(const struct op *op)
{
	switch (op->type) {
	case OP_NAMESPACES:
	case OP_PRIVILEGES:
	case OP_LANDLOCK:
	case OP_SECCOMP:
		return 1;
	case OP_RLIMIT: /* tasks are counted for the whole user, outside as well */
		return op->a != RLIMIT_NPROC;
	case OP_GRANT:
		return !(op->b & GRANT_GATE);
	}
	return 0;
}

static int is_alone(void)
{
	struct stat tasks;
	return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 3;
}

/* Another process may have the very same memory without being a thread or a child: it would stay outside the
 * walls. The kernel refuses to unshare what somebody else has. The table of descriptors and the working directory
 * become this process's own by it. Where a filter refuses the call, ours at the second time, only threads and
 * children can be looked for. */
static int is_its_own(void)
{
	if (syscall(SYS_unshare, (long)(CLONE_VM | CLONE_FILES | CLONE_FS)) == 0)
		return 1;
	return errno == EPERM && prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2;
}

static int make_rules(struct box *box, struct confined *said)
{
	for (unsigned i = 1; i < box->plan.count; i++) {
		const struct op *op = &box->plan.ops[i];
		int result = 0;
		if (!sabotaged_op(i) && op->type == OP_LANDLOCK)
			result = wall_landlock_begin(box, op);
		if (!sabotaged_op(i) && op->type == OP_GRANT)
			result = wall_landlock_grant(box, op);
		if (result)
			return failed(said, op->type, errno, op->s[0]);
	}
	return 0;
}

static int raise_walls(struct box *box, struct confined *said)
{
	const struct plan *plan = &box->plan;
	unsigned last = plan->count - 1; /* the filter: the decoder saw to that */
	const char *culprit = NULL;
	for (unsigned i = 1; i < last; i++) {
		const struct op *op = &plan->ops[i];
		int result = 0;
		if (!sabotaged_op(i) && op->type == OP_RLIMIT)
			result = set_limit(op, 0);
		if (!sabotaged_op(i) && op->type == OP_PRIVILEGES)
			result = wall_privileges(box);
		if (result)
			return failed(said, op->type, errno, NULL);
	}
	if (box->ruleset >= 0 && wall_landlock_enforce(box))
		return failed(said, OP_LANDLOCK, errno, "enforce");
	for (unsigned i = 1; i < last; i++)
		if (confirm_op(box, &plan->ops[i], &culprit))
			return failed(said, plan->ops[i].type, errno, culprit);
	if (confirm_walls(box, &culprit))
		return failed(said, OP_LANDLOCK, errno, culprit);
	if (!sabotaged_op(last) && wall_seccomp(box, &plan->ops[last]))
		return failed(said, OP_SECCOMP, errno, "install");
	if (confirm_seccomp())
		return failed(said, OP_SECCOMP, errno, "a call that the filter must refuse");
	said->rules = box->rules;
	memcpy(said->filter, box->filter, sizeof said->filter);
	return 0;
}

static ssize_t read_patiently(int fd, void *bytes, size_t size)
{
	ssize_t got;
	do
		got = read(fd, bytes, size);
	while (got < 0 && errno == EINTR);
	return got;
}

static _Noreturn void rehearse(struct box *box, int report, int hold)
{
	struct confined said = {0};
	char word;
	box->warden = getppid();
	raise_walls(box, &said);
	if (write(report, &said, sizeof said) == sizeof said)
		read_patiently(hold, &word, 1);
	_exit(0);
}

/* A child without a signal at its end: handlers of the process must not hear of it. */
static pid_t start_rehearsal(struct box *box, int report[2], int hold[2])
{
	pid_t pid = (pid_t)syscall(SYS_clone, 0L, 0L, 0L, 0L, 0L);
	if (pid == 0) {
		close(report[0]);
		close(hold[1]);
		rehearse(box, report[1], hold[0]);
	}
	return pid;
}

static int rehearsed_and_done(struct box *box, struct confined *said)
{
	struct confined heard = {0};
	int report[2] = {-1, -1}, hold[2] = {-1, -1}, result = -1;
	pid_t child = -1;
	if (pipe2(report, O_CLOEXEC) || pipe2(hold, O_CLOEXEC)) {
		failed(said, 0, errno, "pipe");
		goto done;
	}
	child = start_rehearsal(box, report, hold);
	if (child < 0) {
		failed(said, 0, errno, "rehearsal");
		goto done;
	}
	close(report[1]);
	report[1] = -1;
	if (read_patiently(report[0], &heard, sizeof heard) != sizeof heard) {
		failed(said, 0, ECHILD, "the rehearsal ended without a word");
		goto done;
	}
	if (heard.error) {
		*said = heard;
		goto done;
	}
	box->warden = child;
	said->begun = 1;
	result = raise_walls(box, said);
done:
	for (unsigned i = 0; i < 2; i++) {
		if (report[i] >= 0)
			close(report[i]);
		if (hold[i] >= 0)
			close(hold[i]); /* by which the child ends */
	}
	while (child > 0 && waitpid(child, NULL, __WALL) < 0 && errno == EINTR)
		;
	return result;
}

__attribute__((visibility("default"))) int gate_confine(const void *bytes, size_t size, const int *descriptors,
							unsigned count, struct confined *said)
{
	struct box box = {.descriptors = descriptors, .descriptor_count = count, .root = -1, .upper = -1,
			  .image = -1, .base = -1, .canary = -1, .outsider = -1, .ruleset = -1, .inner = -1,
			  .told = -1, .itself = 1};
	struct plan_error wrong;
	int result = -1;
	*said = (struct confined){0};
	if (plan_decode(bytes, size, count, &box.plan, &wrong))
		return failed(said, 0, EBADMSG, wrong.reason);
	if (!plan_is_plain(box.plan.ops) || box.plan.base)
		failed(said, 0, EBADMSG, "needs namespaces");
	for (unsigned i = 0; i < box.plan.count && !said->error; i++)
		if (!fits(&box.plan.ops[i]))
			failed(said, box.plan.ops[i].type, EBADMSG, "is not for a living process");
	if (!said->error && !is_alone())
		failed(said, 0, EBUSY, "threads");
	if (!said->error && !is_its_own())
		failed(said, 0, EBUSY, "memory");
	if (!said->error && make_rules(&box, said) == 0)
		result = rehearsed_and_done(&box, said);
	if (box.ruleset >= 0)
		close(box.ruleset);
	if (box.outsider >= 0)
		close(box.outsider);
	plan_free(&box.plan);
	return result;
}
