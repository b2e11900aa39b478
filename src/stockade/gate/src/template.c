/* A resident gate in an interpreter: programs can go on in a copy of it instead of being executed.
 *
 * The interpreter, the template, has loaded what its programs will need, and calls `template_main`, which
 * does what any resident gate does and never comes back there. The first process of each sandbox is then a
 * copy of the template and runs nothing but the gate. A program that is to go on as Python is one more copy,
 * made behind the walls by an ordinary fork, and only in that copy `template_main` returns.
 *
 * /proc/self/exe of a copy leads to the interpreter's file by the mount that it was executed from, whatever is
 * mounted inside. Its mode and times are nothing that Landlock keeps. So the interpreter is executed from a
 * read-only mount of that one file over itself, which is taken off again before the first sandbox: it has to be there
 * by its name when the dynamic loader looks for libraries beside it, and nowhere in any sandbox's tree.
 *
 * What an execve would take away is taken away here: every descriptor but the program's own, the page that
 * the gate shares with its keepers, and what plans said. Until that is done the copy is not dumpable.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <linux/capability.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

/* More than the frames that are left behind have taken. */
enum { DEAD_FRAMES = 24 << 10 };

static int is_template;
static jmp_buf resume_point;
static struct continuation continuation;
/* As the interpreter had them; a resident gate has none. */
static struct sigaction saved_handlers[NSIG];

#ifdef GATE_SABOTAGE
extern const char *sabotage_order;
#endif

int in_template(void)
{
	return is_template;
}

/* In the namespace that an ordinary user has made for itself: what it may do there is to outlast the execve. */
static int keep_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[2];
	if (syscall(SYS_capget, &header, sets))
		return -1;
	sets[0].inheritable = sets[0].permitted;
	sets[1].inheritable = sets[1].permitted;
	if (syscall(SYS_capset, &header, sets))
		return -1;
	for (unsigned long cap = 0; cap < 64; cap++)
		if ((sets[cap / 32].permitted >> cap % 32 & 1) &&
		    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0))
			return -1;
	return 0;
}

static int execute_sealed(char **argv, char **envp)
{
	struct mount_attr sealed = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
	int file = sys_open_tree(AT_FDCWD, argv[0], OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	if (file < 0 || sys_mount_setattr(file, "", AT_EMPTY_PATH, &sealed) ||
	    sys_move_mount(file, "", AT_FDCWD, argv[0], MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS))
		return -1;
	return execve(argv[0], argv, envp);
}

int template_sealed(const char *kind)
{
	static const char own[] = "/proc/self/exe";
	char path[4096];
	struct statfs info;
	if (strcmp(kind, KIND_PLAIN) == 0)
		return 0;
	ssize_t length = readlink(own, path, sizeof path - 1);
	if (length <= 0)
		return -1;
	path[length] = '\0';
	if (umount2(path, MNT_DETACH))
		return -1;
	owned_fd file = open(own, O_PATH | O_CLOEXEC);
	return file < 0 || fstatfs(file, &info) || !(info.f_flags & ST_RDONLY) ? -1 : 0;
}

int template_start(char **argv)
{
	enum { MOST_VARIABLES = 32 };
	char why[512], *envp[MOST_VARIABLES + 1] = {NULL};
	const char *what = "namespaces", *kind = *argv++;
	/* The supervisor may have had other variables, and a copy's /proc/self/environ would show them for ever. */
	for (unsigned count = 0; *argv && **argv != '/' && count < MOST_VARIABLES; count++)
		envp[count] = *argv++;
	if (*argv == NULL)
		return 2;
	sys_close_range(OPEN_TEXT + 1, ~0u);
	if (resident_unshare(kind) == 0) {
		what = *argv;
		/* Where nothing can be mounted, the filter refuses to change any file's mode or times. */
		if (strcmp(kind, KIND_PLAIN) == 0)
			execve(*argv, argv, envp);
		else if (geteuid() == 0 || keep_capabilities() == 0)
			execute_sealed(argv, envp);
	}
	int length = snprintf(why, sizeof why, "%s: %s", what, strerror(errno));
	return send(OPEN_CONTROL, why, (size_t)length < sizeof why ? (size_t)length : sizeof why - 1, 0) < 0;
}

/* The id maps of a copy are written through its /proc, for which it must be dumpable when it is born. */
void template_set_dumpable(int dumpable)
{
	if (is_template)
		prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0);
}

static __attribute__((noinline)) void wipe_frames(void)
{
	unsigned char room[DEAD_FRAMES];
	explicit_bzero(room, sizeof room);
}

/* In the program's own process, behind every wall. Returns only if it cannot go on. */
void template_resume(struct runs *runs, const struct program *program, unsigned descriptors)
{
	errno = ENOSYS;
	if (!is_template || guard_unmap(runs))
		return;
	const char *name = strrchr(program->argv[0], '/');
	prctl(PR_SET_NAME, name ? name + 1 : program->argv[0]);
	resident_forget(runs->resident);
	wipe(runs->launch->plan_bytes, runs->launch->plan_size);
	wipe(runs->launch, sizeof *runs->launch);
	wipe(runs, sizeof *runs);
	const char *first = program->argv[0];
	continuation = (struct continuation){first, program->size - (size_t)(first - (char *)program->bytes), 0};
	while (program->argv[continuation.argc])
		continuation.argc++;
	environ = program->envp;
	for (int number = 1; number < NSIG; number++)
		if (saved_handlers[number].sa_handler != SIG_DFL && sigaction(number, &saved_handlers[number], NULL))
			return;
	/* The socket to the supervisor is among them, so a failure can no longer be told. Only afterwards may other
	 * processes of the sandbox look at this one. */
	if (sys_close_range(descriptors, ~0u) || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
		_exit(127);
	longjmp(resume_point, 1);
}

void template_main(const char *kind, const char *order, void (*before)(void), void (*after)(void),
		   struct continuation *found)
{
	if (setjmp(resume_point)) {
		*found = continuation;
		wipe_frames();
		after();
		return;
	}
#ifdef GATE_SABOTAGE
	sabotage_order = order;
#else
	(void)order;
#endif
	for (int number = 1; number < NSIG; number++)
		if (sigaction(number, NULL, &saved_handlers[number]))
			saved_handlers[number].sa_handler = SIG_DFL;
	before();
	is_template = 1;
	prctl(PR_SET_NAME, "stockade-gate");
	const char *argv[] = {"stockade-gate", "resident", kind, NULL};
	_exit(resident_main(3, (char **)(uintptr_t)argv));
}
