/* A resident gate in an interpreter: programs can go on in a copy of it instead of being executed.
 *
 * The interpreter, the template, has loaded what its programs will need, and calls `template_main`, which
 * does what any resident gate does and never comes back there. The first process of each sandbox is then a
 * copy of the template and runs nothing but the gate. A program that is to go on as Python is one more copy,
 * made behind the walls by an ordinary fork, and only in that copy `template_main` returns.
 *
 * What an execve would take away is taken away here: every descriptor but the program's own, the page that
 * the gate shares with its keepers, and what plans said. Until that is done the copy is not dumpable.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

/* More than the frames that are left behind have taken. */
enum { DEAD_FRAMES = 24 << 10 };

static int is_template;
static jmp_buf back;
static struct continuation going_on;
/* As the interpreter had them; a resident gate has none. */
static struct sigaction handlers[NSIG];

#ifdef GATE_SABOTAGE
extern const char *sabotage_order;
#endif

int in_template(void)
{
	return is_template;
}

/* The id maps of a copy are written through its /proc, for which it must be dumpable when it is born. */
void template_dumpable(int dumpable)
{
	if (is_template)
		prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0);
}

static __attribute__((noinline)) void forget_frames(void)
{
	unsigned char room[DEAD_FRAMES];
	explicit_bzero(room, sizeof room);
}

/* In the program's own process, behind every wall. Returns only if it cannot go on. */
void template_resume(struct box *box, const struct program *program, unsigned descriptors)
{
	errno = ENOSYS;
	if (!is_template || guard_let_go(box))
		return;
	const char *name = strrchr(program->argv[0], '/');
	prctl(PR_SET_NAME, name ? name + 1 : program->argv[0]);
	resident_forget();
	wipe(box->plan_bytes, box->plan_size);
	memset(box, 0, sizeof *box);
	const char *first = program->argv[0];
	going_on = (struct continuation){first, program->size - (size_t)(first - (char *)program->bytes), 0};
	while (program->argv[going_on.argc])
		going_on.argc++;
	environ = program->envp;
	for (int number = 1; number < NSIG; number++)
		if (handlers[number].sa_handler != SIG_DFL && sigaction(number, &handlers[number], NULL))
			return;
	/* The channel to the supervisor is among them, so nobody can be told any more. Whoever else is in the
	 * sandbox may look at us only afterwards. */
	if (sys_close_range(descriptors, ~0u) || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
		_exit(127);
	longjmp(back, 1);
}

void template_main(const char *kind, const char *order, struct continuation *found)
{
	if (setjmp(back)) {
		*found = going_on;
		forget_frames();
		return;
	}
#ifdef GATE_SABOTAGE
	sabotage_order = order;
#else
	(void)order;
#endif
	for (int number = 1; number < NSIG; number++)
		if (sigaction(number, NULL, &handlers[number]))
			handlers[number].sa_handler = SIG_DFL;
	is_template = 1;
	prctl(PR_SET_NAME, "stockade-gate");
	const char *argv[] = {"stockade-gate", "resident", kind, NULL};
	_exit(resident_main(3, (char **)(uintptr_t)argv));
}
