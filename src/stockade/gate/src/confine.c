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

int gate_confine(const void *bytes, size_t size, const int *descriptors, unsigned count, struct confinement *said);

static int report_failure(struct confinement *said, uint32_t op, int error, const char *text)
{
	said->op = op;
	said->error = error ? error : EIO;
	snprintf(said->text, sizeof said->text, "%s", text ? text : "");
	return -1;
}

/* Of the plain operations, those that a process can do to itself without a warden or init. */
static int suits_a_process(const struct op *op)
{
	switch (op->type) {
	case OP_NAMESPACES:
	case OP_PRIVILEGES:
	case OP_LANDLOCK:
	case OP_PORT:
	case OP_SECCOMP:
		return 1;
	case OP_RLIMIT: /* tasks are counted for the whole user, outside as well */
		return op->a != RLIMIT_NPROC;
	case OP_GRANT:
		return !(op->b & GRANT_GATE);
	}
	return 0;
}

static int has_one_thread(void)
{
	struct stat tasks;
	return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 3;
}

/* Another process may have the very same memory without being a thread or a child: it would stay outside the
 * walls. The kernel refuses to unshare memory that another process has. The table of descriptors and the working directory
 * become this process's own by it. Where a filter refuses the call, such as that of an earlier confinement, only threads and
 * children can be looked for. */
static int shares_no_memory(void)
{
	if (syscall(SYS_unshare, (long)(CLONE_VM | CLONE_FILES | CLONE_FS)) == 0)
		return 1;
	return errno == EPERM && prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2;
}

static int make_rules(struct walls *walls, const struct plan *plan, const int *descriptors, struct confinement *said)
{
	for (unsigned i = 1; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		int result = 0;
		if (!sabotaged_op(i) && op->type == OP_LANDLOCK)
			result = wall_landlock_begin(walls, plan, op);
		if (!sabotaged_op(i) && op->type == OP_GRANT)
			result = wall_landlock_grant(walls, descriptors, op);
		if (!sabotaged_op(i) && op->type == OP_PORT)
			result = wall_landlock_port(walls, op);
		if (result)
			return report_failure(said, op->type, errno, op->s[0]);
	}
	return 0;
}

static int raise_walls(struct walls *walls, const struct plan *plan, struct confinement *said)
{
	unsigned last = plan->count - 1; /* the filter: the decoder saw to that */
	const char *culprit = NULL;
	for (unsigned i = 1; i < last; i++) {
		const struct op *op = &plan->ops[i];
		int result = 0;
		if (!sabotaged_op(i) && op->type == OP_RLIMIT)
			result = set_limit(op, 0);
		if (!sabotaged_op(i) && op->type == OP_PRIVILEGES)
			result = wall_privileges(walls, op->a);
		if (result)
			return report_failure(said, op->type, errno, NULL);
	}
	if (walls->ruleset >= 0 && wall_landlock_enforce(walls))
		return report_failure(said, OP_LANDLOCK, errno, "enforce");
	for (unsigned i = 1; i < last; i++)
		if (confirm_op(walls, &plan->ops[i], &culprit))
			return report_failure(said, plan->ops[i].type, errno, culprit);
	if (confirm_walls(walls, plan, -1, &culprit))
		return report_failure(said, OP_LANDLOCK, errno, culprit);
	if (!sabotaged_op(last) && wall_seccomp(walls, &plan->ops[last]))
		return report_failure(said, OP_SECCOMP, errno, "install");
	if (confirm_seccomp())
		return report_failure(said, OP_SECCOMP, errno, "a call that the filter must refuse");
	said->rules = walls->rules;
	memcpy(said->filter, walls->filter, sizeof said->filter);
	return 0;
}

static ssize_t read_all_of(int fd, void *bytes, size_t size)
{
	ssize_t got;
	do
		got = read(fd, bytes, size);
	while (got < 0 && errno == EINTR);
	return got;
}

static _Noreturn void rehearse(struct walls *walls, const struct plan *plan, int report, int hold)
{
	struct confinement said = {0};
	char word;
	walls->warden = getppid();
	raise_walls(walls, plan, &said);
	if (write(report, &said, sizeof said) == sizeof said)
		read_all_of(hold, &word, 1);
	_exit(0);
}

/* A child without a signal at its end: handlers of the process must not hear of it. */
static pid_t start_rehearsal(struct walls *walls, const struct plan *plan, int report[2], int hold[2])
{
	pid_t pid = (pid_t)syscall(SYS_clone, 0L, 0L, 0L, 0L, 0L);
	if (pid == 0) {
		close(report[0]);
		close(hold[1]);
		rehearse(walls, plan, report[1], hold[0]);
	}
	return pid;
}

static int rehearse_then_raise(struct walls *walls, const struct plan *plan, struct confinement *said)
{
	struct confinement heard = {0};
	int report[2] = {-1, -1}, hold[2] = {-1, -1}, result = -1;
	pid_t child = -1;
	if (pipe2(report, O_CLOEXEC) || pipe2(hold, O_CLOEXEC)) {
		report_failure(said, 0, errno, "pipe");
		goto done;
	}
	child = start_rehearsal(walls, plan, report, hold);
	if (child < 0) {
		report_failure(said, 0, errno, "rehearsal");
		goto done;
	}
	close_fd(&report[1]);
	if (read_all_of(report[0], &heard, sizeof heard) != sizeof heard) {
		report_failure(said, 0, ECHILD, "the rehearsal ended without a word");
		goto done;
	}
	if (heard.error) {
		*said = heard;
		goto done;
	}
	walls->warden = child;
	said->begun = 1;
	result = raise_walls(walls, plan, said);
done:
	close_fds(report, 2);
	close_fds(hold, 2); /* by which the child ends */
	while (child > 0 && waitpid(child, NULL, __WALL) < 0 && errno == EINTR)
		;
	return result;
}

__attribute__((visibility("default"))) int gate_confine(const void *bytes, size_t size, const int *descriptors,
							unsigned count, struct confinement *said)
{
	struct walls walls = NO_WALLS;
	struct plan plan;
	struct plan_error wrong;
	int result = -1;
	walls.itself = 1;
	*said = (struct confinement){0};
	if (plan_decode(bytes, size, count, &plan, &wrong))
		return report_failure(said, 0, EBADMSG, wrong.reason);
	if (!plan_is_plain(plan.ops) || plan.base)
		report_failure(said, 0, EBADMSG, "needs namespaces");
	for (unsigned i = 0; i < plan.count && !said->error; i++)
		if (!suits_a_process(&plan.ops[i]))
			report_failure(said, plan.ops[i].type, EBADMSG, "is not for a living process");
	if (!said->error && !has_one_thread())
		report_failure(said, 0, EBUSY, "threads");
	if (!said->error && !shares_no_memory())
		report_failure(said, 0, EBUSY, "memory");
	if (!said->error && make_rules(&walls, &plan, descriptors, said) == 0)
		result = rehearse_then_raise(&walls, &plan, said);
	close_fd(&walls.ruleset);
	close_fd(&walls.outsider);
	plan_free(&plan);
	return result;
}
