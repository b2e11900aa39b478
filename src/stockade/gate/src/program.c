/* Starting a program behind the walls that are up. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>

enum { SIGNAL_SHARES = 16 };

int set_limit(const struct op *op, uint64_t reserve)
{
	rlim_t value = op->b + (op->a == RLIMIT_NPROC ? reserve : 0);
	struct rlimit limit = {value, value};
	return setrlimit((int)op->a, &limit);
}

/* A signal that is sent when the user has no room for more pending ones arrives without its sender, and so looks as
 * if it came from outside the sandbox (`asked_to_end`). Programs run out of room long before the gate does. */
static int limit_pending_signals(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_SIGPENDING, &limit))
		return -1;
	rlim_t share = limit.rlim_cur / SIGNAL_SHARES;
	limit = (struct rlimit){share, share};
	return setrlimit(RLIMIT_SIGPENDING, &limit);
}

int program_decode(struct program *program)
{
	size_t size = program->size;
	struct exec_body header;
	errno = EBADMSG;
	if (size <= sizeof header || program->bytes[size - 1] != '\0')
		return -1;
	memcpy(&header, program->bytes, sizeof header);
	if (header.size != size || header.argc == 0 || header.argc > size || header.envc > size)
		return -1;
	if ((header.uid == NO_ID) != (header.gid == NO_ID))
		return -1;
	program->uid = header.uid;
	program->gid = header.gid;
	if (header.settled)
		program->settings = program->bytes + offsetof(struct exec_body, settings);
	size_t strings = 1 + (size_t)header.argc + header.envc;
	program->argv = calloc(strings + 1, sizeof(char *));
	if (program->argv == NULL)
		return -1;
	program->envp = program->argv + header.argc + 1;
	char *at = (char *)program->bytes + sizeof header, *end = (char *)program->bytes + size;
	for (size_t i = 0; i < strings; i++) {
		errno = EBADMSG;
		if (at >= end)
			return -1;
		if (i == 0)
			program->cwd = at;
		else if (i <= header.argc)
			program->argv[i - 1] = at;
		else
			program->envp[i - 1 - header.argc] = at;
		at += strlen(at) + 1;
	}
	return at == end ? 0 : -1;
}

void program_free(struct program *program)
{
	wipe(program->bytes, program->size);
	free(program->bytes);
	free(program->argv);
}

/* Those that a terminal sends. */
static void set_terminal_signals(void (*handler)(int))
{
	static const int numbers[] = {SIGHUP, SIGINT, SIGQUIT, SIGTSTP, SIGTTIN, SIGTTOU};
	for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++)
		signal(numbers[i], handler);
}

/* The kernel does not stop an orphaned process group from its terminal: some parent must be in the same session and
 * in another group. So the leader of the session is the process that attends to the program. */
static int lead_session(int terminal)
{
	set_terminal_signals(SIG_IGN);
	if (getsid(0) != getpid() && setsid() < 0)
		return -1;
	return ioctl(terminal, TIOCSCTTY, 0);
}

/* A terminal of the sandbox's own: its outer end goes to the supervisor, the program gets the inner one. */
int program_terminal(struct program *program)
{
	struct reply reply = {.kind = REPLY_TERMINAL};
	struct winsize size = {.ws_row = (unsigned short)(program->request.value >> 16),
			       .ws_col = (unsigned short)program->request.value};
	int unlocked = 0, inner = -1;
	owned_fd outer = sys_open("/dev/ptmx", O_RDWR | O_NOCTTY);
	if (outer < 0)
		return -1;
	if (ioctl(outer, TIOCSPTLCK, &unlocked) == 0 && ioctl(outer, TIOCSWINSZ, &size) == 0)
		inner = ioctl(outer, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	/* As a login does; an id that is not mapped is refused later. */
	if (inner >= 0 && program->uid != NO_ID && fchown(inner, program->uid, (gid_t)-1) && errno != EINVAL && errno != EPERM)
		return -1;
	int result = inner < 0 || (program->settings && ioctl(inner, TCSETS, program->settings)) ||
			     lead_session(inner) || send_reply(program->socket, &reply, &outer, 1)
			 ? -1
			 : 0;
	for (int i = 0; i < 3; i++)
		if (program->stdio[i] < 0)
			program->stdio[i] = inner;
	return result;
}

static const char *path_of(char **envp)
{
	for (; *envp; envp++)
		if (strncmp(*envp, "PATH=", 5) == 0)
			return *envp + 5;
	return "/usr/bin:/bin";
}

/* As execvpe does, but with the PATH of the program's own environment. */
static void execute_program(const struct program *program)
{
	const char *name = program->argv[0], *path = path_of(program->envp);
	if (strchr(name, '/') || !*name) {
		sys_execve(name, program->argv, program->envp);
		return;
	}
	int refused = 0;
	char candidate[4096];
	for (;; path++) {
		int length = (int)strcspn(path, ":");
		int wrote = snprintf(candidate, sizeof candidate, "%.*s/%s", length ? length : 1,
				     length ? path : ".", name);
		errno = ENAMETOOLONG;
		if (wrote > 0 && (size_t)wrote < sizeof candidate)
			sys_execve(candidate, program->argv, program->envp);
		if (errno == EACCES)
			refused = 1;
		else if (errno != ENOENT && errno != ENOTDIR)
			return;
		path += length;
		if (*path == '\0')
			break;
	}
	errno = refused ? EACCES : ENOENT;
}

/* The program's descriptors. Where it has more than three, what is still needed may lie where they belong, and
 * is moved out of the way first. */
static int place_descriptors(const struct program *program, int *socket, int *entrance, int *inner)
{
	int given[3 + EXEC_MORE_MOST], count = 3 + (int)program->extra;
	int *others[] = {socket, entrance, inner};
	memcpy(given, program->stdio, sizeof program->stdio);
	memcpy(given + 3, program->more, program->extra * sizeof *given);
	for (int i = 0; count > 3 && i < count + 3; i++) {
		int *needed = i < count ? &given[i] : others[i - count];
		if (*needed >= 0 && (*needed = fcntl(*needed, F_DUPFD, count)) < 0)
			return -1;
	}
	for (int i = 0; i < count; i++)
		if (dup2(given[i], i) < 0)
			return -1;
	return (int)syscall(SYS_close_range, (unsigned)count, ~0u, 4 /* CLOSE_RANGE_CLOEXEC */);
}

/* A process group of its own in the session of its terminal, which hears what that sends. */
static int join_session(const struct program *program)
{
	if (setpgid(0, 0))
		return -1;
	if (!(program->request.flags & EXEC_BEHIND) && tcsetpgrp(0, getpid()))
		return -1;
	set_terminal_signals(SIG_DFL);
	return 0;
}

/* A program that opens a pipe again by its name in /proc needs the right of its owner. Files and terminals of the host stay
 * whose they are. */
static void give_pipes(uid_t uid)
{
	struct statfs info;
	for (int i = 0; i < 3; i++)
		if (fstatfs(i, &info) == 0 && info.f_type == PIPEFS_MAGIC && fchown(i, uid, (gid_t)-1))
			continue; /* then it can be read and written as it is, and not opened again */
}

/* Not through the C library, which would tell other threads, those of a template it is a copy of. An id that the
 * namespace does not map is EINVAL; another than init's where root keeps no right to change ids, EPERM. Root that
 * becomes another user has no capability left then. */
static int become_user(const struct program *program)
{
	uid_t uid = program->uid;
	gid_t gid = program->gid;
	if (uid == NO_ID)
		return 0;
	int itself = uid == geteuid() && gid == getegid();
	if (!itself)
		give_pipes(uid);
	/* Where only the caller is mapped, the kernel lets no process drop a group. */
	if (syscall(SYS_setgroups, 0, NULL))
		return itself && errno == EPERM ? 0 : -1;
	if (syscall(SYS_setresgid, gid, gid, gid) || syscall(SYS_setresuid, uid, uid, uid))
		return -1;
	/* As fs.suid_dumpable says, a change of ids may have made this copy of the gate readable. */
	return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

static _Noreturn void become_program(struct runs *runs, const struct program *program)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED};
	const char *what = "descriptors";
	const struct plan *plan = &runs->launch->plan;
	int socket = program->socket, entrance = program->entrance, inner = runs->inner;
	sigset_t none;
	sigemptyset(&none);
	if (place_descriptors(program, &socket, &entrance, &inner))
		goto failed;
	what = "session";
	if (program->request.flags & EXEC_TERMINAL ? join_session(program) : setsid() < 0)
		goto failed;
	if (sigprocmask(SIG_SETMASK, &none, NULL))
		goto failed;
	umask(runs->mask);
	what = "limits";
	if (limit_pending_signals())
		goto failed;
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_RLIMIT && set_limit(&plan->ops[i], runs->kept))
			goto failed;
	what = "landlock";
	if (wall_inner(inner))
		goto failed;
	what = "cwd";
	/* Magic links would lead to descriptors instead of directories of the sandbox. Where the host's own tree
	 * is seen, a directory is one of the sandbox if it may be read. */
	int flags = (runs->inner < 0 ? O_PATH : O_RDONLY) | O_DIRECTORY;
	int cwd = sys_openat2(AT_FDCWD, program->cwd, (uint64_t)flags, RESOLVE_NO_MAGICLINKS);
	if (cwd < 0 || fchdir(cwd))
		goto failed;
	what = "cgroup";
	if (entrance >= 0 && write(entrance, "0", 1) != 1)
		goto failed;
	what = "user";
	if (become_user(program)) /* last: the cgroup is entered, and the directory, by whom the caller is inside */
		goto failed;
	struct reply started = {.kind = REPLY_STARTED};
	if (program->request.flags & EXEC_TELL)
		send_reply(socket, &started, NULL, 0);
	what = program->request.flags & EXEC_RESUME ? "template" : "command";
	if (program->request.flags & EXEC_RESUME)
		template_resume(runs, program, 3 + program->extra);
	else
		execute_program(program);
failed:
	reply.error = errno;
	snprintf(reply.text, sizeof reply.text, "%s", what);
	send_reply(socket, &reply, NULL, 0);
	_exit(127);
}

/* Nothing is copied for a child that executes at once, and it never returns into the gate's frames. One that goes on
 * needs the C library's own fork, which tells its locks and its thread that they are another process's. One that
 * becomes another user must not share the gate's memory meanwhile: with its ids the kernel may make that readable. */
pid_t program_start(struct runs *runs, const struct program *program)
{
	pid_t pid;
	if (program->request.flags & EXEC_RESUME)
		pid = fork();
	else if (program->uid != NO_ID)
		pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	else
		pid = vfork();
	if (pid == 0)
		become_program(runs, program);
	return pid;
}
