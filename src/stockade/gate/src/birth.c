/* What a sandbox is born with: the namespaces, the ids that its user namespace maps, and the tasks that these may have. */
#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static int write_file(const char *path, const char *text)
{
	owned_fd file = open(path, O_WRONLY | O_CLOEXEC);
	return file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -1;
}

/* The rows of the plan; else the caller's own ids, or for root every id, so that no file's owner is unknown inside.
 * With rows, groups may be dropped wherever the resident itself may drop them. */
int birth_map(pid_t pid, const struct birth *birth, uid_t uid, gid_t gid)
{
	char path[64], map[MOST_ID_ROWS * 34];
	static const char *const files[] = {"uid_map", "gid_map"};
	int every = (birth->how & MAPS_EVERY_ID) != 0;
	if (!every && !birth->counts[0]) {
		snprintf(path, sizeof path, "/proc/%d/setgroups", (int)pid);
		if (write_file(path, "deny"))
			return -1;
	}
	for (int i = 0; i < 2; i++) {
		const struct id_row own = {.inside = i == 0 ? uid : gid, .outside = i == 0 ? uid : gid, .count = 1};
		const struct id_row all = {.count = NO_ID};
		const struct id_row *rows = birth->counts[i] ? birth->rows[i] : every ? &all : &own;
		size_t used = 0;
		for (unsigned row = 0; row < (birth->counts[i] ? birth->counts[i] : 1); row++)
			used += (size_t)snprintf(map + used, sizeof map - used, "%u %u %u\n", rows[row].inside, rows[row].outside,
						 rows[row].count);
		snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, files[i]);
		if (write_file(path, map))
			return -1;
	}
	return 0;
}

/* Subordinate ids are mapped by programs of the host, which the supervisor runs: here is no right to it. Groups that
 * have no number inside are dropped, as the map allows. */
int birth_await_maps(void)
{
	char word[sizeof WORD_MAPPED] = {0};
	if (send(OPEN_CONTROL, WORD_UNSHARED, sizeof WORD_UNSHARED - 1, MSG_NOSIGNAL) < 0)
		return -1;
	if (recv(OPEN_CONTROL, word, sizeof word - 1, 0) != sizeof word - 1 || strcmp(word, WORD_MAPPED)) {
		errno = EPERM;
		return -1;
	}
	return setgroups(0, NULL);
}

/* The kernel counts the tasks of each id by itself, so that who may become another would have as many again. All ids
 * of a user namespace together it compares with the limit of the user who made the namespace (Linux 5.14), and counts what
 * the resident's other sandboxes have as well. Root has a cgroup instead. */
int birth_limit(const struct birth *birth, struct rlimit *before)
{
	uint64_t tasks = birth->tasks;
	if (tasks == 0)
		return 0;
	if (getrlimit(RLIMIT_NPROC, before))
		return -1;
	struct rlimit limit = *before;
	if (tasks + GRACE_TASKS < limit.rlim_cur)
		limit.rlim_cur = tasks + GRACE_TASKS;
	return setrlimit(RLIMIT_NPROC, &limit);
}

void birth_read(const struct plan *plan, struct birth *birth)
{
	memset(birth, 0, sizeof *birth);
	birth->flags = sabotaged_flags(plan->ops[0].a);
	birth->how = (uint32_t)plan->ops[0].b;
	birth->keep = plan_keeps(plan);
	for (int i = 0; i < 2; i++)
		birth->counts[i] = plan_id_rows(&plan->ops[0], i, birth->rows[i]);
	for (unsigned i = 0; i < plan->count && birth->counts[0]; i++)
		if (plan->ops[i].type == OP_RLIMIT && plan->ops[i].a == RLIMIT_NPROC && plan->ops[i].b <= INT32_MAX)
			birth->tasks = plan->ops[i].b;
}
