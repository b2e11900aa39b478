/* What init watches while programs run: the memory and the processor time of the whole sandbox, where a
 * cgroup counts them, and that no mount comes off.
 *
 * The host can replace a file on which a mount of the sandbox lies, and the kernel then takes the mount
 * away with it. What it covered could be written, so nothing goes on.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { SHORTEST_MS = 5, OVER_MS = 50 };

static int memory = -1, usage = -1, table = -1, counted;
static uint64_t oom_kills; /* for want of memory, when that was last looked at */
static uint64_t allowed_us;
static unsigned cores = 1;

static struct breaches own_breaches;

int guard_share(struct runs *runs)
{
	if (runs->breaches != &own_breaches)
		return 0;
	struct breaches *shared = mmap(NULL, sizeof own_breaches, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return -1;
	*shared = own_breaches;
	runs->breaches = shared;
	return 0;
}

int guard_open(struct runs *runs)
{
	const struct plan *plan = &runs->launch->plan;
	runs->breaches = &own_breaches;
	for (unsigned i = plan->base + 1; i < plan->count && table < 0; i++) {
		const struct op *op = &plan->ops[i];
		if (op->type == OP_BIND && !(op->a & MOUNT_ATTR_RDONLY)) {
			table = sys_open("/proc/self/mountinfo", O_RDONLY);
			if (table < 0)
				return -1;
		}
	}
	return 0;
}

int guard_unmap(struct runs *runs)
{
	return runs->breaches == &own_breaches ? 0 : munmap(runs->breaches, sizeof own_breaches);
}

/* 0, or -1 for a request that makes no sense. The descriptors are kept. */
int guard_watch(const struct request *request, int *descriptors, unsigned count)
{
	unsigned next = 0;
	if (memory >= 0 || usage >= 0)
		return -1;
	if ((request->flags & WATCH_MEMORY) && next < count) {
		memory = descriptors[next++];
		counted = (request->flags & WATCH_COUNTED) != 0;
	}
	if ((request->flags & WATCH_CPU) && next < count) {
		usage = descriptors[next++];
		allowed_us = request->wall_us;
		cores = request->value ? request->value : 1;
	}
	for (unsigned i = 0; i < next; i++)
		descriptors[i] = -1;
	return next == count ? 0 : -1;
}

void guard_polls(struct pollfd *polls)
{
	polls[0] = (struct pollfd){memory, counted ? POLLPRI : POLLIN, 0};
	polls[1] = (struct pollfd){table, POLLPRI, 0};
}

/* The number behind a word at the beginning of a line; without a word the number that the file consists of. */
static uint64_t number_in(int file, const char *word)
{
	char text[1024];
	ssize_t got = pread(file, text, sizeof text - 1, 0);
	text[got > 0 ? got : 0] = '\0';
	const char *at = text;
	if (*at >= '0' && *at <= '9')
		return strtoull(at, NULL, 10);
	for (size_t length = strlen(word); at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
		if (strncmp(at, word, length) == 0)
			return strtoull(at + length, NULL, 10);
	return 0;
}

/* Version 1 counts nanoseconds in a file of its own, version 2 microseconds behind a word. */
static uint64_t read_used_us(void)
{
	char first = 0;
	if (pread(usage, &first, 1, 0) != 1)
		return 0;
	uint64_t number = number_in(usage, "usage_usec ");
	return first >= '0' && first <= '9' ? number / 1000 : number;
}

/* Whether the processor time of the whole sandbox is used up. */
int guard_spent(void)
{
	return usage >= 0 && read_used_us() >= allowed_us;
}

int guard_timeout(int otherwise)
{
	if (usage < 0)
		return otherwise;
	uint64_t used = read_used_us(), left = used < allowed_us ? (allowed_us - used) / cores / 1000 : OVER_MS;
	int patience = left > 1000000 ? 1000000 : left < SHORTEST_MS ? SHORTEST_MS : (int)left;
	return otherwise >= 0 && otherwise < patience ? otherwise : patience;
}

static int is_mount(const struct op *op)
{
	return op->type == OP_BIND || op->type == OP_VIEW || op->type == OP_OVERLAY || op->type == OP_SCRATCH;
}

/* Whether a path is in a tree that is writable for real. */
static int in_writable(const struct plan *plan, const char *path)
{
	for (unsigned i = plan->base + 1; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		size_t length = op->type == OP_BIND && !(op->a & MOUNT_ATTR_RDONLY) ? strlen(op->s[0]) : 0;
		if (length && strncmp(path, op->s[0], length) == 0 && path[length] == '/')
			return 1;
	}
	return 0;
}

/* Where something of the plan is no longer mounted, and what it covered can be written. */
static const char *uncovered(const struct plan *plan)
{
	for (unsigned i = plan->base + 1; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		struct statx info;
		if (!is_mount(op) || !in_writable(plan, op->s[0]))
			continue;
		if (statx(AT_FDCWD, op->s[0], AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &info) ||
		    !(info.stx_attributes & STATX_ATTR_MOUNT_ROOT))
			return op->s[0];
	}
	return NULL;
}

enum end_reason guard_check(const struct runs *runs, const struct pollfd *polls)
{
	uint64_t fired;
	const char *path = polls[1].revents ? uncovered(&runs->launch->plan) : NULL;
	if (path) {
		struct reply reply = {.kind = REPLY_FAILED, .op = OP_BIND, .error = ENODATA};
		snprintf(reply.text, sizeof reply.text, "%s", path);
		kill(-1, SIGKILL);
		send_reply(runs->launch->socket, &reply, NULL, 0);
		_exit(1);
	}
	uint64_t before = oom_kills;
	if (polls[0].revents && counted)
		oom_kills = number_in(memory, "oom_kill ");
	if (polls[0].revents &&
	    (counted ? oom_kills > before : read(memory, &fired, sizeof fired) == sizeof fired))
		runs->breaches->kind = ENDED_BY_MEMORY;
	else if (guard_spent())
		runs->breaches->kind = ENDED_BY_CPU;
	else
		return ENDED_ITSELF;
	runs->breaches->count++;
	return runs->breaches->kind;
}
