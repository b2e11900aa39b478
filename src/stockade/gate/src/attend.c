/* Staying with one program until it has ended, and ending it when it must end.
 *
 * Init attends to the one run of a sandbox that ends with it; a run of a sandbox that lives on has a keeper, a child
 * of init, that does the same for the run's own processes. The time is kept here, so that a run ends in time also
 * when the supervisor is busy or stopped.
 *
 * One run at a time needs no keeper: one that begins when init has no child, and so no other process is inside. Init
 * attends to it beside everything else that init does. The processes of that run are all that descend from init and
 * from no keeper. So as long as it goes on, a keeper stays with what its own program has left behind, which would
 * otherwise become init's; and init tells its keepers from other children because they are what the kernel calls
 * clone children (`start_kept`): no program can make a child of init that is one.
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

/* How often what is left is killed again, and for how long. A program that forks faster than that ends the whole
 * sandbox. */
enum { KILL_AGAIN_MS = 10, KILL_FOR_MS = 2000, MOST_STOPS = 200 };

struct run {
	const struct runs *runs;
	int socket, all;
	int scoped; /* every process that can be signalled is of this run */
	int beside; /* init goes on, and what is below its keepers belongs to other runs */
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
	enum end_reason ended;
};

/* The run that init attends to beside everything else. */
static struct run beside = {.socket = -1, .beside = 1};

uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int asked_to_end(int signals)
{
	struct signalfd_siginfo info;
	int told = 0;
	/* A sender outside the pid namespace has no number here, and no process inside can pretend to have none. */
	while (read(signals, &info, sizeof info) == sizeof info)
		told |= info.ssi_signo == SIGTERM && info.ssi_code == SI_USER && info.ssi_pid == 0;
	return told;
}

int warden_asks_end(int from_warden, short events)
{
	char byte;
	if (!events)
		return 0;
	if (read(from_warden, &byte, 1) == 1)
		return 1;
	/* The warden is gone: programs would outlive the sandbox if init waited for them. */
	do
		kill(-1, SIGKILL);
	while (waitpid(-1, NULL, __WALL) > 0 || errno == EINTR);
	_exit(1);
}

struct task {
	pid_t pid, parent;
	char state; /* as /proc shows it: T is stopped, Z has ended */
};

static int compare_pids(const void *one, const void *other)
{
	pid_t a = ((const struct task *)one)->pid, b = ((const struct task *)other)->pid;
	return (a > b) - (a < b);
}

static struct task read_task(const char *pid)
{
	char path[32], text[512];
	struct task task = {.pid = atoi(pid)};
	snprintf(path, sizeof path, "/proc/%.16s/stat", pid);
	owned_fd file = sys_open(path, O_RDONLY);
	if (file < 0)
		return task;
	ssize_t got = read(file, text, sizeof text - 1);
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
	owned_fd directory = sys_open("/proc", O_RDONLY | O_DIRECTORY);
	DIR *proc = directory < 0 ? NULL : fdopendir(directory);
	if (proc)
		take_fd(&directory);
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
		tasks[(*count)++] = read_task(entry->d_name);
	}
	if (proc)
		closedir(proc);
	if (tasks)
		qsort(tasks, *count, sizeof *tasks, compare_pids);
	return tasks;
}

static int is_keeper(const struct runs *runs, pid_t pid)
{
	for (unsigned i = 0; i < runs->kept; i++)
		if (runs->keepers[i] == pid)
			return 1;
	return 0;
}

/* Returns how many of them are neither stopped nor dead. */
static unsigned signal_once(const struct runs *runs, int number, enum exemption spared)
{
	pid_t ancestor = getpid();
	size_t count;
	unsigned active = 0;
	struct task *tasks = list_tasks(&count);
	for (size_t i = 0; tasks && i < count; i++) {
		struct task at = tasks[i];
		/* The parents of a list that was not read at once might form a circle. */
		for (size_t steps = 0; at.parent && at.parent != ancestor && steps < count; steps++) {
			struct task key = {.pid = at.parent};
			struct task *up = bsearch(&key, tasks, count, sizeof *tasks, compare_pids);
			at = up ? *up : (struct task){0};
		}
		if (at.parent != ancestor ||
		    (spared != NOBODY && is_keeper(runs, spared == KEEPERS ? tasks[i].pid : at.pid)))
			continue;
		kill(tasks[i].pid, number);
		active += !strchr("TtZX", tasks[i].state);
	}
	free(tasks);
	return active;
}

void signal_descendants(const struct runs *runs, int number, enum exemption spared)
{
	/* A process that is not stopped yet may start another, or wake one that is. */
	for (unsigned i = 0; signal_once(runs, number, spared) && number == SIGSTOP && i < MOST_STOPS; i++)
		poll(NULL, 0, 1);
}

static void signal_all(const struct run *run, int number)
{
	/* Without keepers everything inside is of the run that has none: the kernel then reaches all at once, also those
	 * that are being born. */
	if (run->scoped || (run->beside && !run->runs->kept))
		kill(-1, number);
	else
		signal_descendants(run->runs, number, run->beside ? THEIR_RUNS : NOBODY);
}

static void end_run(struct run *run, enum end_reason ended, uint64_t grace)
{
	if (run->stage != RUNNING && grace)
		return;
	if (run->stage == RUNNING)
		run->ended = ended;
	run->stage = grace ? ASKED : KILLED;
	run->deadline = now_ms() + (grace ? grace : KILL_FOR_MS);
	signal_all(run, grace ? SIGTERM : SIGKILL);
	signal_all(run, SIGCONT); /* a stopped program hears nothing else */
}

/* Once until the supervisor has answered, so that no program can fill the socket with its stops. */
static void tell_stopped(struct run *run, int number)
{
	struct reply reply = {.kind = REPLY_STOPPED, .status = (uint32_t)number};
	if (run->stopped || run->stage != RUNNING)
		return;
	run->stopped = 1;
	send_reply(run->socket, &reply, NULL, 0);
}

static void add_time(struct timeval *sum, struct timeval more)
{
	sum->tv_sec += more.tv_sec;
	sum->tv_usec += more.tv_usec;
}

/* One that has ended, or was stopped. 0: none has, -1: there is none. */
static pid_t reap_one(struct run *run, int options)
{
	int status;
	struct rusage used;
	pid_t pid = wait4(-1, &status, options, &used);
	if (pid > 0 && WIFSTOPPED(status)) {
		if (pid == run->leader)
			tell_stopped(run, WSTOPSIG(status));
		return pid;
	}
	if (pid <= 0)
		return pid;
	if (pid == run->leader) {
		run->leader = 0;
		run->status = status;
	}
	add_time(&run->used.ru_utime, used.ru_utime);
	add_time(&run->used.ru_stime, used.ru_stime);
	run->used.ru_maxrss = used.ru_maxrss > run->used.ru_maxrss ? used.ru_maxrss : run->used.ru_maxrss;
	run->used.ru_nvcsw += used.ru_nvcsw + used.ru_nivcsw;
	return pid;
}

/* Reaps what has ended. Returns whether anything is left. */
static int reap(struct run *run)
{
	pid_t pid;
	do
		pid = reap_one(run, WNOHANG | (run->all ? __WALL : 0) | (run->terminal ? WUNTRACED : 0));
	while (pid > 0);
	return pid == 0;
}

static void report(const struct run *run)
{
	const struct rusage *used = &run->used;
	struct reply reply = {
	    .kind = REPLY_EXITED, .status = (uint32_t)run->status, .ended = run->ended};
	const struct breaches *breaches = run->runs->breaches;
	if (breaches->count != run->breaches)
		reply.ended = breaches->kind;
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	reply.ended_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
	reply.user_us = (uint64_t)used->ru_utime.tv_sec * 1000000 + (uint64_t)used->ru_utime.tv_usec;
	reply.system_us = (uint64_t)used->ru_stime.tv_sec * 1000000 + (uint64_t)used->ru_stime.tv_usec;
	reply.peak_kib = (uint64_t)used->ru_maxrss;
	reply.switches = (uint64_t)used->ru_nvcsw;
	if (run->status)
		reply.index = count_unreached(&run->runs->launch->plan);
	send_reply(run->socket, &reply, NULL, 0);
}

/* The program has ended. In a sandbox that ends with it, everything else is killed and reaped before the report; what
 * has lost its parent is init's child, so if there is no child, there is no process left. */
static _Noreturn void finish(struct run *run)
{
	if (run->all && run->left) {
		kill(-1, SIGKILL);
		while (reap_one(run, __WALL) > 0 || errno == EINTR)
			;
	}
	report(run);
	if (run->runs->beside) { /* what is left must not become init's, see above */
		sys_close_range(0, ~0u);
		while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
			;
	}
	_exit(0);
}

static void set_foreground(pid_t group)
{
	owned_fd terminal = sys_open("/dev/tty", O_RDWR | O_NOCTTY);
	if (terminal >= 0) /* or it has hung up */
		tcsetpgrp(terminal, group);
}

static void handle_request(struct run *run)
{
	struct request request;
	int passed = -1;
	unsigned count = run->all ? 1 : 0; /* init attends to it, and may serve a publisher */
	int got = receive(run->socket, &request, sizeof request, &passed, &count);
	if (got <= 0) {
		close_fd(&run->socket);
		end_run(run, ENDED_BY_REQUEST, run->grace);
	} else if (request.kind == REQUEST_END) {
		end_run(run, ENDED_BY_REQUEST, request.grace_ms);
	} else if (request.kind == REQUEST_SIGNAL && (request.flags & SIGNAL_ALL)) {
		signal_all(run, (int)request.value);
	} else if (request.kind == REQUEST_SIGNAL && run->leader) {
		if (run->terminal && (request.flags & (SIGNAL_INFRONT | SIGNAL_BEHIND)))
			set_foreground(request.flags & SIGNAL_INFRONT ? run->leader : getpgrp());
		if (request.value == SIGCONT)
			run->stopped = 0;
		kill(-run->leader, (int)request.value);
	} else if (request.kind == REQUEST_TIME && run->stage == RUNNING) {
		run->deadline = request.wall_us ? now_ms() + (request.wall_us + 999) / 1000 : 0;
	} else if (request.kind == REQUEST_SERVE && count == 1) {
		publish_open(&run->runs->launch->plan, take_fd(&passed));
	}
	close_fd(&passed);
}

static void keep_time(struct run *run)
{
	uint64_t now = now_ms();
	if (run->stage == KILLED) {
		if (now < run->deadline)
			signal_all(run, SIGKILL);
		else if (run->beside)
			kill(-1, SIGKILL);
		else
			_exit(1); /* init then kills everything */
	} else if (run->deadline && now >= run->deadline) {
		end_run(run, ENDED_BY_TIME, run->stage == RUNNING ? run->grace : 0);
	}
}

/* The supervisor is gone: no grace is longer than GRACE_MS any more. */
static void outlive_supervisor(struct run *run)
{
	uint64_t latest = now_ms() + GRACE_MS;
	run->orphaned = 1;
	end_run(run, ENDED_BY_REQUEST, run->grace < GRACE_MS ? run->grace : GRACE_MS);
	if (run->deadline > latest)
		run->deadline = latest;
}

static int run_timeout(const struct run *run)
{
	uint64_t now = now_ms();
	if (run->stage == KILLED)
		return KILL_AGAIN_MS;
	if (!run->deadline)
		return -1;
	uint64_t left = run->deadline > now ? run->deadline - now : 0;
	return left > 1000000 ? 1000000 : (int)left;
}

static int refuse_program(const struct program *program, const char *text)
{
	struct reply reply = {.kind = REPLY_EXEC_FAILED, .error = errno};
	snprintf(reply.text, sizeof reply.text, "%s", text);
	send_reply(program->socket, &reply, NULL, 0);
	return -1;
}

/* 0, or -1 when the supervisor has been told why not. */
static int begin(struct runs *runs, struct program *program, struct run *run)
{
	const struct request *request = &program->request;
	run->runs = runs;
	run->socket = program->socket;
	run->scoped = run->all || runs->plain;
	run->terminal = (request->flags & EXEC_TERMINAL) != 0;
	if (run->terminal && program_terminal(program))
		return refuse_program(program, "terminal");
	run->breaches = runs->breaches->count;
	run->grace = request->grace_ms;
	run->deadline = request->wall_us ? now_ms() + (request->wall_us + 999) / 1000 : 0;
	run->leader = program_start(runs, program);
	return run->leader < 0 ? refuse_program(program, "start") : 0;
}

/* A request that has arrived comes before the end: a supervisor that has let go of a run wants all of it to end, also
 * if the leader saw that too and was faster. */
static int has_ended(struct run *run)
{
	run->left = reap(run);
	struct pollfd waiting = {run->socket, POLLIN, 0};
	if (run->leader == 0 && run->left && run->stage == RUNNING && poll(&waiting, 1, 0) > 0)
		handle_request(run);
	return run->leader == 0 && (run->stage == RUNNING || !run->left);
}

void attend(struct runs *runs, struct program *program, int children, int all)
{
	struct run run = {.all = all};
	close_fd(&beside.socket);
	if (begin(runs, program, &run))
		_exit(0);
	close_fd(&runs->to_resident); /* tells the resident that this start is over */
	for (int i = 0; i < 3; i++)
		if (i == 0 || program->stdio[i] != program->stdio[0]) /* a terminal is one descriptor */
			close(program->stdio[i]);
	close_fds(program->more, program->extra);
	for (;;) {
		if (has_ended(&run))
			finish(&run);
		struct pollfd watched[5 + GUARD_POLLS] = {
		    {run.socket, POLLIN, 0},
		    {run.orphaned ? -1 : runs->launch->supervisor, POLLIN, 0},
		    {children, POLLIN, 0},
		    {all ? runs->from_warden : -1, POLLIN, 0},
		    publish_poll()};
		if (all)
			guard_polls(watched + 5);
		int wait = run_timeout(&run);
		if (poll(watched, all ? 5 + GUARD_POLLS : 5, all ? guard_timeout(wait) : wait) < 0 && errno != EINTR)
			_exit(1);
		if (watched[1].revents)
			outlive_supervisor(&run);
		if (warden_asks_end(runs->from_warden, watched[3].revents) || (watched[2].revents && asked_to_end(children) && all))
			end_run(&run, ENDED_FROM_OUTSIDE, run.grace);
		if (watched[0].revents)
			handle_request(&run);
		publish_handle(watched[4].revents);
		if (all && run.stage != KILLED && guard_check(runs, watched + 5))
			end_run(&run, ENDED_ITSELF, 0);
		keep_time(&run);
	}
}

void beside_begin(struct runs *runs, struct program *program)
{
	beside = (struct run){.beside = 1};
	runs->beside = begin(runs, program, &beside) == 0;
	if (!runs->beside)
		close_fd(&beside.socket);
}

/* The socket of that run, or -1. What earlier runs left behind is reaped here as well. */
int beside_socket(struct runs *runs)
{
	if (has_ended(&beside) && runs->beside) {
		report(&beside);
		close_fd(&beside.socket);
		runs->beside = 0;
	}
	return runs->beside ? beside.socket : -1;
}

int beside_timeout(const struct runs *runs)
{
	return runs->beside ? run_timeout(&beside) : -1;
}

void beside_handle(const struct runs *runs, short events)
{
	if (events)
		handle_request(&beside);
	if (runs->beside)
		keep_time(&beside);
}
