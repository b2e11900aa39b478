/* The sandbox's first process: raises the walls on itself, then starts programs on request. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { MAX_RUNS = 64, MAX_BODY = 8 << 20, EXEC_DESCRIPTORS = 4 };

static struct run {
	uint32_t id;
	pid_t pid; /* 0: free */
	int last;
} runs[MAX_RUNS];

static _Noreturn void refuse(const struct box *box, unsigned index, uint32_t op, int error,
			     const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text ? text : "");
	send_reply(box->socket, &reply, NULL, 0);
	_exit(1);
}

static void tell(const struct box *box, uint32_t kind)
{
	struct reply reply = {.kind = kind};
	if (send_reply(box->socket, &reply, NULL, 0))
		_exit(1);
}

static int set_limit(const struct op *op, rlim_t reserve)
{
	rlim_t value = op->b + (op->a == RLIMIT_NPROC ? reserve : 0);
	struct rlimit limit = {value, value};
	return setrlimit((int)op->a, &limit);
}

static void await_word(const struct box *box)
{
	char word;
	if (read(box->word, &word, 1) != 1)
		_exit(1); /* the resident has said why */
}

static int execute(struct box *box, const struct op *op, const char **culprit)
{
	*culprit = op->s[0];
	switch (op->type) {
	case OP_HOSTNAME:
		return sethostname(op->s[0], strlen(op->s[0]));
	case OP_ROOT:
		return mount_root(box, op);
	case OP_PIVOT:
		return mount_pivot(box);
	case OP_KEYRING:
		return wall_keyring();
	case OP_RLIMIT:
		/* The gate keeps room for itself, so that a program that has used up every task
		 * cannot keep it from starting another. */
		return set_limit(op, GRACE_TASKS);
	case OP_PRIVILEGES:
		await_word(box); /* afterwards nobody can look at our namespaces any more */
		return wall_privileges();
	case OP_LANDLOCK:
		return wall_landlock_begin(box, op);
	case OP_GRANT:
		return wall_landlock_grant(box, op);
	case OP_SECCOMP:
		return wall_seccomp(op);
	}
	return mount_op(box, op, culprit);
}

static void raise_walls(struct box *box)
{
	const char *culprit = NULL;
	const struct plan *plan = &box->plan;
	unsigned last = plan->count - 1; /* the filter: the decoder saw to that */
	box->keyring = session_keyring();
	for (unsigned i = plan->base + 1; i < last; i++) {
		if (!sabotaged_op(i) && execute(box, &plan->ops[i], &culprit))
			refuse(box, i, plan->ops[i].type, errno, culprit);
		/* No operation after this one mounts anything: the decoder saw to that as well. The
		 * supervisor can read the mounts while we go on. */
		if (plan->ops[i].type == OP_PIVOT) {
			for (unsigned d = 0; d < box->descriptor_count; d++)
				close(box->descriptors[d]);
			tell(box, REPLY_MOUNTED);
		}
	}
	if (box->ruleset >= 0 && wall_landlock_enforce(box))
		refuse(box, last, OP_LANDLOCK, errno, "enforce");
	for (unsigned i = plan->base + 1; i < last; i++)
		if (confirm_op(box, &plan->ops[i], &culprit))
			refuse(box, i, plan->ops[i].type, errno, culprit);
	if (confirm_walls(box, &culprit))
		refuse(box, last, OP_LANDLOCK, errno, culprit);
	if (!sabotaged_op(last) && execute(box, &plan->ops[last], &culprit))
		refuse(box, last, OP_SECCOMP, errno, "install");
	if (confirm_seccomp())
		refuse(box, last, OP_SECCOMP, errno, "a call that the filter must refuse");
}

struct program {
	unsigned char *bytes;
	const char *cwd;
	char **argv, **envp;
};

static int read_program(int body, struct program *program)
{
	size_t size;
	struct exec_body header;
	*program = (struct program){0};
	if (read_whole(body, MAX_BODY, &program->bytes, &size))
		return -1;
	errno = EBADMSG;
	if (size <= sizeof header || program->bytes[size - 1] != '\0')
		return -1;
	memcpy(&header, program->bytes, sizeof header);
	if (header.size != size || header.argc == 0 || header.argc > size || header.envc > size)
		return -1;
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

static void free_program(struct program *program)
{
	free(program->bytes);
	free(program->argv);
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
		execve(name, program->argv, program->envp);
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
			execve(candidate, program->argv, program->envp);
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

static _Noreturn void become(const struct box *box, uint32_t id, const struct program *program,
			     const int *stdio)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .id = id};
	const char *what = "descriptors";
	sigset_t none;
	sigemptyset(&none);
	for (int i = 0; i < 3; i++)
		if (dup2(stdio[i], i) < 0)
			goto failed;
	if (syscall(SYS_close_range, 3, ~0u, 4 /* CLOSE_RANGE_CLOEXEC */))
		goto failed;
	what = "session";
	if (setsid() < 0 || sigprocmask(SIG_SETMASK, &none, NULL))
		goto failed;
	umask(box->mask);
	what = "limits";
	for (unsigned i = 0; i < box->plan.count; i++)
		if (box->plan.ops[i].type == OP_RLIMIT && set_limit(&box->plan.ops[i], 0))
			goto failed;
	what = "cwd";
	/* Magic links would lead to descriptors instead of directories of the sandbox. */
	int cwd = sys_openat2(AT_FDCWD, program->cwd, O_PATH | O_DIRECTORY, RESOLVE_NO_MAGICLINKS);
	if (cwd < 0 || fchdir(cwd))
		goto failed;
	what = "command";
	execute_program(program);
failed:
	reply.error = errno;
	snprintf(reply.text, sizeof reply.text, "%s", what);
	send_reply(box->socket, &reply, NULL, 0);
	_exit(127);
}

/* Nothing is copied for a child that executes at once, and it never returns into our frames. */
static pid_t spawn(const struct box *box, uint32_t id, const struct program *program, const int *stdio)
{
	pid_t pid = vfork();
	if (pid == 0)
		become(box, id, program, stdio);
	return pid;
}

static void start(struct box *box, const struct request *request, const int *descriptors)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .id = request->id, .text = "request"};
	struct program program;
	struct run *run = NULL;
	for (unsigned i = 0; i < MAX_RUNS && run == NULL; i++)
		if (runs[i].pid == 0)
			run = &runs[i];
	errno = EAGAIN;
	int ready = run != NULL && read_program(descriptors[0], &program) == 0;
	pid_t pid = ready ? spawn(box, request->id, &program, descriptors + 1) : -1;
	/* Closed, it tells the resident that this start is over and its idle work disturbs nobody. */
	if (box->word >= 0) {
		close(box->word);
		box->word = -1;
	}
	if (pid > 0) {
		*run = (struct run){request->id, pid, request->flags & REQUEST_LAST};
	} else {
		reply.error = errno;
		send_reply(box->socket, &reply, NULL, 0);
	}
	if (run != NULL)
		free_program(&program);
}

static void signal_run(const struct request *request)
{
	if (request->flags & REQUEST_ALL) {
		kill(-1, (int)request->value);
		return;
	}
	for (unsigned i = 0; i < MAX_RUNS; i++)
		if (runs[i].pid && runs[i].id == request->id)
			kill(-runs[i].pid, (int)request->value);
}

static void report(const struct box *box, const struct run *run, int status)
{
	struct rusage usage;
	struct reply reply = {.kind = REPLY_EXITED, .id = run->id, .status = (uint32_t)status};
	getrusage(RUSAGE_CHILDREN, &usage);
	reply.user_us = (uint64_t)usage.ru_utime.tv_sec * 1000000 + (uint64_t)usage.ru_utime.tv_usec;
	reply.system_us = (uint64_t)usage.ru_stime.tv_sec * 1000000 + (uint64_t)usage.ru_stime.tv_usec;
	reply.peak_kib = (uint64_t)usage.ru_maxrss;
	reply.switches = (uint64_t)(usage.ru_nvcsw + usage.ru_nivcsw);
	send_reply(box->socket, &reply, NULL, 0);
}

/* Reaps everything that ended, also orphans that programs left to us. */
static void reap(const struct box *box)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		for (unsigned i = 0; i < MAX_RUNS; i++) {
			if (runs[i].pid != pid)
				continue;
			if (runs[i].last) {
				/* Before the word is given, nothing else of the sandbox is alive. */
				kill(-1, SIGKILL);
				while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
					;
			}
			report(box, &runs[i], status);
			if (runs[i].last)
				_exit(0);
			runs[i].pid = 0;
		}
	}
}

static void serve(struct box *box, int children)
{
	struct pollfd watched[] = {{box->socket, POLLIN, 0}, {box->supervisor, POLLIN, 0},
				   {children, POLLIN, 0}};
	for (;;) {
		if (poll(watched, 3, -1) < 0 && errno != EINTR)
			_exit(1);
		if (watched[1].revents)
			_exit(0);
		if (watched[2].revents) {
			struct signalfd_siginfo ignored;
			if (read(children, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
				_exit(1);
			reap(box);
		}
		if (!watched[0].revents)
			continue;
		struct request request;
		int descriptors[EXEC_DESCRIPTORS];
		unsigned count = EXEC_DESCRIPTORS;
		if (receive(box->socket, &request, sizeof request, descriptors, &count) <= 0)
			_exit(0);
		if (request.kind == REQUEST_EXEC && count == EXEC_DESCRIPTORS)
			start(box, &request, descriptors);
		else if (request.kind == REQUEST_SIGNAL && count == 0)
			signal_run(&request);
		else
			_exit(1);
		for (unsigned i = 0; i < count; i++)
			close(descriptors[i]);
	}
}

void inside_main(struct box *box)
{
	sigset_t child;
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, NULL);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);

	await_word(box);
	int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	if (children < 0)
		refuse(box, 0, 0, errno, "signalfd");
	setsid();
	raise_walls(box);
	close(box->root);
	close(box->base);
	close(box->canary);
	close(box->ruleset);
	tell(box, REPLY_READY);
	serve(box, children);
	_exit(0);
}
