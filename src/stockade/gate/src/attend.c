/* Staying with one program until it has ended, and ending it when it must end.
 *
 * PID 1 attends to the one run of a sandbox that ends with it; every run of a sandbox that lives on has a
 * keeper, a child of PID 1, that does the same for the run's own processes. The time is watched here, so
 * that it ends a run also when the supervisor is busy or stopped.
 *
 * A keeper has a number, so the program of a kept run that is to be process 2 has none: PID 1 attends to it beside
 * whatever else it does. Its processes are then all that descend from PID 1 and from no keeper. So as long as that
 * run goes on, a keeper stays with what its own has left behind, which would otherwise become PID 1's; and PID 1
 * tells its keepers from other children by what the kernel calls clone children: start_kept.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>

/* How often what is left is killed again, and how long: whoever forks faster ends the whole sandbox. */
enum { AGAIN_MS = 10, PATIENCE_MS = 2000, STOPS = 200 };

struct watch {
	const struct box *box;
	int socket, all;
	int scoped; /* every process that can be signalled is of this run */
	int beside; /* PID 1 goes on, and what is below its keepers is none of this run */
	int orphaned; /* the supervisor is gone */
	uint32_t breaches; /* before it began */
	pid_t leader; /* 0: it has ended */
	int left;     /* whether a child was, when they were last waited for */
	int status;
	struct rusage used; /* by those that have ended */
	int terminal; /* whether it has one */
	int stopped;  /* and was stopped, as the supervisor knows */
	uint64_t grace, deadline; /* of the next step, 0: never */
	enum { RUNNING, ASKED, KILLED } stage;
	enum ended ended;
};

/* The run that PID 1 attends to beside everything else. */
static struct watch first = {.socket = -1, .beside = 1};

uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int told_to_end(int signals)
{
	struct signalfd_siginfo info;
	int told = 0;
	/* From outside the pid namespace the sender has no number; from inside nobody can feign that. */
	while (read(signals, &info, sizeof info) == sizeof info)
		told |= info.ssi_signo == SIGTERM && info.ssi_code == SI_USER && info.ssi_pid == 0;
	return told;
}

int told_by_warden(const struct box *box, short events)
{
	char byte;
	if (!events)
		return 0;
	if (read(box->told, &byte, 1) == 1)
		return 1;
	/* It is gone: whatever lives below us would live on if we waited. */
	do
		kill(-1, SIGKILL);
	while (waitpid(-1, NULL, __WALL) > 0 || errno == EINTR);
	_exit(1);
}

struct task {
	pid_t pid, parent;
	char state; /* as /proc shows it: T is stopped, Z has ended */
};

static int by_pid(const void *one, const void *other)
{
	pid_t a = ((const struct task *)one)->pid, b = ((const struct task *)other)->pid;
	return (a > b) - (a < b);
}

static struct task look_at(const char *pid)
{
	char path[32], text[512];
	struct task task = {.pid = atoi(pid)};
	snprintf(path, sizeof path, "/proc/%.16s/stat", pid);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return task;
	ssize_t got = read(file, text, sizeof text - 1);
	close(file);
	text[got > 0 ? got : 0] = '\0';
	const char *name_end = strrchr(text, ')'); /* the name itself may hold anything */
	if (name_end)
		sscanf(name_end, ") %c %d", &task.state, &task.parent);
	return task;
}

/* Every process of the sandbox, sorted. */
static struct task *list_tasks(size_t *count)
{
	struct task *tasks = NULL;
	size_t room = 0;
	*count = 0;
	DIR *proc = opendir("/proc");
	for (struct dirent *entry; proc && (entry = readdir(proc));) {
		if (entry->d_name[0] < '0' || entry->d_name[0] > '9')
			continue;
		if (*count == room) {
			room = room ? room * 2 : 256;
			struct task *more = realloc(tasks, room * sizeof *tasks);
			if (more == NULL)
				break;
			tasks = more;
		}
		tasks[(*count)++] = look_at(entry->d_name);
	}
	if (proc)
		closedir(proc);
	if (tasks)
		qsort(tasks, *count, sizeof *tasks, by_pid);
	return tasks;
}

static int is_keeper(const struct box *box, pid_t pid)
{
	for (unsigned i = 0; i < box->kept; i++)
		if (box->keepers[i] == pid)
			return 1;
	return 0;
}

/* Returns how many of them are neither stopped nor dead. */
static unsigned signal_once(const struct box *box, int number, enum spared spared)
{
	pid_t ancestor = getpid();
	size_t count;
	unsigned active = 0;
	struct task *tasks = list_tasks(&count);
	for (size_t i = 0; i < count; i++) {
		struct task at = tasks[i];
		/* The parents of a list that was not read at once might form a circle. */
		for (size_t steps = 0; at.parent && at.parent != ancestor && steps < count; steps++) {
			struct task key = {.pid = at.parent};
			struct task *up = bsearch(&key, tasks, count, sizeof *tasks, by_pid);
			at = up ? *up : (struct task){0};
		}
		if (at.parent != ancestor ||
		    (spared != NOBODY && is_keeper(box, spared == KEEPERS ? tasks[i].pid : at.pid)))
			continue;
		kill(tasks[i].pid, number);
		active += !strchr("TtZX", tasks[i].state);
	}
	free(tasks);
	return active;
}

void signal_descendants(const struct box *box, int number, enum spared spared)
{
	/* Whoever is not stopped yet may start another, or wake one that is. */
	for (unsigned i = 0; signal_once(box, number, spared) && number == SIGSTOP && i < STOPS; i++)
		poll(NULL, 0, 1);
}

static void signal_all(const struct watch *watch, int number)
{
	if (watch->scoped)
		kill(-1, number);
	else
		signal_descendants(watch->box, number, watch->beside ? THEIR_RUNS : NOBODY);
}

static void end_run(struct watch *watch, enum ended ended, uint64_t grace)
{
	if (watch->stage != RUNNING && grace)
		return;
	if (watch->stage == RUNNING)
		watch->ended = ended;
	watch->stage = grace ? ASKED : KILLED;
	watch->deadline = now_ms() + (grace ? grace : PATIENCE_MS);
	signal_all(watch, grace ? SIGTERM : SIGKILL);
	signal_all(watch, SIGCONT); /* a stopped program hears nothing else */
}

/* Once until the supervisor has answered, so that no program can fill the socket with its stops. */
static void tell_stopped(struct watch *watch, int number)
{
	struct reply reply = {.kind = REPLY_STOPPED, .status = (uint32_t)number};
	if (watch->stopped || watch->stage != RUNNING)
		return;
	watch->stopped = 1;
	send_reply(watch->socket, &reply, NULL, 0);
}

static void add_time(struct timeval *sum, struct timeval more)
{
	sum->tv_sec += more.tv_sec;
	sum->tv_usec += more.tv_usec;
}

/* One that has ended, or was stopped. 0: none has, -1: there is none. */
static pid_t reap_one(struct watch *watch, int options)
{
	int status;
	struct rusage used;
	pid_t pid = wait4(-1, &status, options, &used);
	if (pid > 0 && WIFSTOPPED(status)) {
		if (pid == watch->leader)
			tell_stopped(watch, WSTOPSIG(status));
		return pid;
	}
	if (pid <= 0)
		return pid;
	if (pid == watch->leader) {
		watch->leader = 0;
		watch->status = status;
	}
	add_time(&watch->used.ru_utime, used.ru_utime);
	add_time(&watch->used.ru_stime, used.ru_stime);
	watch->used.ru_maxrss = used.ru_maxrss > watch->used.ru_maxrss ? used.ru_maxrss : watch->used.ru_maxrss;
	watch->used.ru_nvcsw += used.ru_nvcsw + used.ru_nivcsw;
	return pid;
}

/* Reaps what has ended. Returns whether anything is left. */
static int reap(struct watch *watch)
{
	pid_t pid;
	do
		pid = reap_one(watch, WNOHANG | (watch->all ? __WALL : 0) | (watch->terminal ? WUNTRACED : 0));
	while (pid > 0);
	return pid == 0;
}

static void report(const struct box *box, const struct watch *watch)
{
	const struct rusage *used = &watch->used;
	struct reply reply = {
	    .kind = REPLY_EXITED, .status = (uint32_t)watch->status, .ended = watch->ended};
	if (box->breaches->count != watch->breaches)
		reply.ended = box->breaches->kind;
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	reply.ended_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
	reply.user_us = (uint64_t)used->ru_utime.tv_sec * 1000000 + (uint64_t)used->ru_utime.tv_usec;
	reply.system_us = (uint64_t)used->ru_stime.tv_sec * 1000000 + (uint64_t)used->ru_stime.tv_usec;
	reply.peak_kib = (uint64_t)used->ru_maxrss;
	reply.switches = (uint64_t)used->ru_nvcsw;
	if (watch->status)
		reply.index = unreached(box);
	send_reply(watch->socket, &reply, NULL, 0);
}

/* The program has ended. In a sandbox that ends with it nothing else is alive when the word is given; what has lost
 * its parent is our child, so that without one there is nothing. */
static _Noreturn void finish(const struct box *box, struct watch *watch)
{
	if (watch->all && watch->left) {
		kill(-1, SIGKILL);
		while (reap_one(watch, __WALL) > 0 || errno == EINTR)
			;
	}
	report(box, watch);
	if (box->first) { /* what is left must not become PID 1's, see above */
		sys_close_range(0, ~0u);
		while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
			;
	}
	_exit(0);
}

static void give_terminal(pid_t group)
{
	int terminal = open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (terminal < 0)
		return; /* hung up */
	tcsetpgrp(terminal, group);
	close(terminal);
}

static void hear(struct watch *watch)
{
	struct request request;
	unsigned none = 0;
	int got = receive(watch->socket, &request, sizeof request, NULL, &none);
	if (got <= 0) {
		close(watch->socket);
		watch->socket = -1;
		end_run(watch, ENDED_BY_REQUEST, watch->grace);
	} else if (request.kind == REQUEST_END) {
		end_run(watch, ENDED_BY_REQUEST, request.grace_ms);
	} else if (request.kind == REQUEST_SIGNAL && (request.flags & SIGNAL_ALL)) {
		signal_all(watch, (int)request.value);
	} else if (request.kind == REQUEST_SIGNAL && watch->leader) {
		if (watch->terminal && (request.flags & (SIGNAL_INFRONT | SIGNAL_BEHIND)))
			give_terminal(request.flags & SIGNAL_INFRONT ? watch->leader : getpgrp());
		if (request.value == SIGCONT)
			watch->stopped = 0;
		kill(-watch->leader, (int)request.value);
	} else if (request.kind == REQUEST_TIME && watch->stage == RUNNING) {
		watch->deadline = request.wall_us ? now_ms() + (request.wall_us + 999) / 1000 : 0;
	}
}

static void keep_time(struct watch *watch)
{
	uint64_t now = now_ms();
	if (watch->stage == KILLED) {
		if (now < watch->deadline)
			signal_all(watch, SIGKILL);
		else if (watch->beside)
			kill(-1, SIGKILL);
		else
			_exit(1); /* PID 1 does that then */
	} else if (watch->deadline && now >= watch->deadline) {
		end_run(watch, ENDED_BY_TIME, watch->stage == RUNNING ? watch->grace : 0);
	}
}

/* Nobody is there any more who could want to wait longer. */
static void be_orphaned(struct watch *watch)
{
	uint64_t latest = now_ms() + GRACE_MS;
	watch->orphaned = 1;
	end_run(watch, ENDED_BY_REQUEST, watch->grace < GRACE_MS ? watch->grace : GRACE_MS);
	if (watch->deadline > latest)
		watch->deadline = latest;
}

static int patience(const struct watch *watch)
{
	uint64_t now = now_ms();
	if (watch->stage == KILLED)
		return AGAIN_MS;
	if (!watch->deadline)
		return -1;
	uint64_t left = watch->deadline > now ? watch->deadline - now : 0;
	return left > 1000000 ? 1000000 : (int)left;
}

static int refuse_program(const struct program *program, const char *text)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .error = errno};
	snprintf(reply.text, sizeof reply.text, "%s", text);
	send_reply(program->socket, &reply, NULL, 0);
	return -1;
}

/* 0, or -1 when it has been said why not. */
static int begin(struct box *box, struct program *program, struct watch *watch)
{
	const struct request *request = &program->request;
	watch->box = box;
	watch->socket = program->socket;
	watch->scoped = watch->all || box->warden;
	watch->terminal = (request->flags & EXEC_TERMINAL) != 0;
	if (watch->terminal && program_terminal(program))
		return refuse_program(program, "terminal");
	watch->breaches = box->breaches->count;
	watch->grace = request->grace_ms;
	watch->deadline = request->wall_us ? now_ms() + (request->wall_us + 999) / 1000 : 0;
	watch->leader = program_start(box, program);
	return watch->leader < 0 ? refuse_program(program, "start") : 0;
}

/* What waits to be heard comes before the end: whoever has let go of a run wants all of it to end, although the
 * leader, which saw that too, was faster. */
static int is_over(struct watch *watch)
{
	watch->left = reap(watch);
	struct pollfd waiting = {watch->socket, POLLIN, 0};
	if (watch->leader == 0 && watch->left && watch->stage == RUNNING && poll(&waiting, 1, 0) > 0)
		hear(watch);
	return watch->leader == 0 && (watch->stage == RUNNING || !watch->left);
}

void attend(struct box *box, struct program *program, int children, int all)
{
	struct watch watch = {.all = all};
	if (first.socket >= 0)
		close(first.socket);
	if (begin(box, program, &watch))
		_exit(0);
	if (box->word >= 0)
		close(box->word); /* tells the resident that this start is over */
	for (int i = 0; i < 3; i++)
		if (i == 0 || program->stdio[i] != program->stdio[0]) /* a terminal is one descriptor */
			close(program->stdio[i]);
	for (int i = 0; i < 2; i++)
		if (program->more[i] >= 0)
			close(program->more[i]);
	for (;;) {
		if (is_over(&watch))
			finish(box, &watch);
		struct pollfd watched[4 + GUARD_POLLS] = {
		    {watch.socket, POLLIN, 0},
		    {watch.orphaned ? -1 : box->supervisor, POLLIN, 0},
		    {children, POLLIN, 0},
		    {all ? box->told : -1, POLLIN, 0}};
		if (all)
			guard_polls(watched + 4);
		int wait = patience(&watch);
		if (poll(watched, all ? 4 + GUARD_POLLS : 4, all ? guard_patience(wait) : wait) < 0 && errno != EINTR)
			_exit(1);
		if (watched[1].revents)
			be_orphaned(&watch);
		if (told_by_warden(box, watched[3].revents) || (watched[2].revents && told_to_end(children) && all))
			end_run(&watch, ENDED_FROM_OUTSIDE, watch.grace);
		if (watched[0].revents)
			hear(&watch);
		if (all && watch.stage != KILLED && guard_check(box, watched + 4))
			end_run(&watch, ENDED_ITSELF, 0);
		keep_time(&watch);
	}
}

void first_begin(struct box *box, struct program *program)
{
	box->first = begin(box, program, &first) == 0;
	if (box->first)
		return;
	close(first.socket);
	first.socket = -1;
}

/* Where it is heard of, or -1. Whoever was left behind by earlier runs is reaped here as well. */
int first_socket(struct box *box)
{
	if (is_over(&first) && box->first) {
		report(box, &first);
		if (first.socket >= 0)
			close(first.socket);
		first.socket = -1;
		box->first = 0;
	}
	return box->first ? first.socket : -1;
}

int first_patience(const struct box *box)
{
	return box->first ? patience(&first) : -1;
}

void first_hear(const struct box *box, short events)
{
	if (events)
		hear(&first);
	if (box->first)
		keep_time(&first);
}
