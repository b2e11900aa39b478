/* The resident gate: clones the first process of each sandbox.
 *
 * It is small, so that a clone is cheap however large the supervising program is. Two things are
 * made ahead of a launch. A network namespace, which costs more than any other part of a start; each
 * is used by one sandbox and never before. And the base, the part of the root that plans of one
 * profile have in common; it is read-only and built again when a plan asks for another.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <grp.h>
#include <linux/sched.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { CONTROL = 3, SUPERVISOR = 4, PATIENCE_MS = 5 };

static const uint64_t NEEDED_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID;
static const uint64_t KNOWN_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
					 CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWNET;

static int host_network; /* started for sandboxes that share the host's network */
static int spare_network; /* the network namespace we are in is fresh and ours to give away */
/* Our end of the pipe to the last sandbox that was born: in error once its first program has been
 * started, or it died. Until then our idle work would take the processor that it needs. */
static int newborn = -1;
static mode_t mask;
static uid_t uid;
static gid_t gid;

static int write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_CLOEXEC);
	if (file < 0)
		return -1;
	ssize_t wrote = write(file, text, strlen(text));
	int error = errno;
	close(file);
	errno = error;
	return wrote == (ssize_t)strlen(text) ? 0 : -1;
}

/* The caller's own ids, or for root every id, so that no file's owner is unknown inside. */
static int write_maps(pid_t pid, int every)
{
	char path[64], map[64];
	static const char *const files[] = {"uid_map", "gid_map"};
	if (!every) {
		snprintf(path, sizeof path, "/proc/%d/setgroups", (int)pid);
		if (write_file(path, "deny"))
			return -1;
	}
	for (int i = 0; i < 2; i++) {
		unsigned id = i == 0 ? uid : gid;
		snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, files[i]);
		if (every)
			snprintf(map, sizeof map, "0 0 4294967295");
		else
			snprintf(map, sizeof map, "%u %u 1", id, id);
		if (write_file(path, map))
			return -1;
	}
	return 0;
}

static int make_network(void)
{
	if (host_network || spare_network || !(sabotaged_flags(CLONE_NEWNET) & CLONE_NEWNET))
		return 0;
	if (unshare(CLONE_NEWNET))
		return -1;
	struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (probe < 0)
		return -1;
	int result = ioctl(probe, SIOCSIFFLAGS, &lo);
	close(probe);
	spare_network = result == 0;
	return result;
}

static const char *const dispensable[] = {"/sys", "/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/hugepages"};

/* An ordinary user may make namespaces and mounts only in a user namespace of its own. */
static int become_owner(void)
{
	if (uid == 0 ? setgroups(0, NULL) || unshare(CLONE_NEWNS)
		     : unshare(CLONE_NEWUSER | CLONE_NEWNS) || write_maps(getpid(), 0))
		return -1;
	/* What the host mounts later is to be seen here; what is done here must never reach the host,
	 * so this comes before anything else. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
		return -1;
	/* Each sandbox begins with a copy of our mounts; what no policy may grant can go. In an ordinary
	 * user's namespace these are locked in place, and stay. */
	for (unsigned i = 0; i < sizeof dispensable / sizeof *dispensable; i++)
		umount2(dispensable[i], MNT_DETACH);
	return 0;
}

static struct {
	unsigned char *bytes; /* the records it was built from, NULL: there is none */
	size_t size;
} base;

static void drop_base(int mounted)
{
	if (mounted)
		mount_base_drop();
	free(base.bytes);
	base.bytes = NULL;
}

/* 0, or -1 with errno set and the index of the operation that failed. */
static int make_base(const struct plan *plan, unsigned *index, const char **culprit)
{
	if (base.bytes && base.size == plan->base_size &&
	    memcmp(base.bytes, plan->base_bytes, base.size) == 0)
		return 0;
	if (base.bytes)
		drop_base(1);
	struct box tree = {.root = -1, .upper = -1, .image = -1};
	int mounted = 0;
	base.size = plan->base_size;
	base.bytes = malloc(base.size + 1);
	*culprit = "base";
	*index = 0;
	if (base.bytes == NULL || mount_base(&tree))
		goto failed;
	mounted = 1;
	memcpy(base.bytes, plan->base_bytes, base.size);
	for (unsigned i = 1; i <= plan->base; i++) {
		*index = i;
		*culprit = plan->ops[i].s[0];
		if (!sabotaged_op(i) && mount_op(&tree, &plan->ops[i], culprit))
			goto failed;
		if (confirm_op(&tree, &plan->ops[i], culprit))
			goto failed;
	}
	if (mount_seal(&tree))
		goto failed;
	close(tree.root);
	return 0;
failed:;
	int error = errno;
	if (tree.root >= 0)
		close(tree.root);
	drop_base(mounted);
	errno = error;
	return -1;
}

static void refuse(int socket, unsigned index, uint32_t op, int error, const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text);
	send_reply(socket, &reply, NULL, 0);
}

/* Shows the supervisor who was born: a pidfd and the namespaces, as the kernel has them. */
static int announce(int socket, pid_t pid, int pidfd)
{
	static const char *const names[] = {"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"};
	int shown[8] = {pidfd, -1, -1, -1, -1, -1, -1, -1}, result = 0;
	for (unsigned i = 1; i < 8 && result == 0; i++) {
		char path[48];
		snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)pid, names[i - 1]);
		shown[i] = open(path, O_RDONLY | O_CLOEXEC);
		result = shown[i] < 0 ? -1 : 0;
	}
	struct reply reply = {.kind = REPLY_BORN, .status = (uint32_t)pid};
	if (result == 0)
		result = send_reply(socket, &reply, shown, 8);
	int error = errno;
	for (unsigned i = 1; i < 8; i++)
		if (shown[i] >= 0)
			close(shown[i]);
	errno = error;
	return result;
}

/* Clones the first process. The plan is in its memory already, decoded. */
static void start(const struct plan *plan, const int *descriptors, unsigned count, uint64_t flags)
{
	static struct box box; /* static: the clone keeps it after this frame is gone */
	int socket = descriptors[LAUNCH_SOCKET], word[2], pidfd = -1;
	if (pipe2(word, O_CLOEXEC)) {
		refuse(socket, 0, OP_NAMESPACES, errno, "pipe");
		return;
	}
	box = (struct box){.socket = socket,
			   .supervisor = descriptors[LAUNCH_SUPERVISOR],
			   .word = word[0],
			   .descriptors = descriptors + LAUNCH_FIRST,
			   .descriptor_count = count - LAUNCH_FIRST,
			   .plan = *plan,
			   .mask = mask,
			   .root = -1,
			   .upper = -1,
			   .image = -1,
			   .base = -1,
			   .canary = -1,
			   .ruleset = -1};
	struct clone_args args = {.flags = (flags & ~(uint64_t)CLONE_NEWNET) | CLONE_PIDFD,
				  .pidfd = (uintptr_t)&pidfd,
				  .exit_signal = SIGCHLD};
	for (unsigned i = plan->base + 1; i < plan->count; i++)
		if (plan->ops[i].type == OP_CGROUP && plan->ops[i].a == 2 && !sabotaged_op(i)) {
			args.flags |= CLONE_INTO_CGROUP;
			args.cgroup = (uint64_t)descriptors[LAUNCH_FIRST + plan->ops[i].b - 1];
		}
	pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0) {
		close(CONTROL);
		close(SUPERVISOR);
		close(descriptors[LAUNCH_PLAN]);
		close(word[1]);
		if (newborn >= 0)
			close(newborn);
		inside_main(&box);
	}
	close(word[0]);
	if (flags & CLONE_NEWNET)
		spare_network = 0;
	const char *failed = NULL;
	if (pid < 0)
		failed = "clone";
	else if (!sabotaged_maps() && write_maps(pid, plan->ops[0].b == 1))
		failed = "id maps";
	else if (write(word[1], "", 1) != 1 || announce(socket, pid, pidfd) || write(word[1], "", 1) != 1)
		failed = "announce";
	if (failed) {
		refuse(socket, 0, OP_NAMESPACES, errno, failed);
		close(word[1]); /* whoever was born waits for a word and ends without it */
		word[1] = -1;
	}
	if (pidfd >= 0)
		close(pidfd);
	if (newborn >= 0)
		close(newborn);
	newborn = word[1];
}

static void launch(const int *descriptors, unsigned count)
{
	int socket = descriptors[LAUNCH_SOCKET];
	unsigned char *bytes;
	size_t size;
	struct plan plan;
	struct plan_error wrong;
	if (read_whole(descriptors[LAUNCH_PLAN], PLAN_MAX_SIZE, &bytes, &size)) {
		refuse(socket, 0, 0, errno, "read");
		return;
	}
	if (plan_decode(bytes, size, count - LAUNCH_FIRST, &plan, &wrong)) {
		refuse(socket, wrong.index, 0, EBADMSG, wrong.reason);
		free(bytes);
		return;
	}
	uint64_t wanted = plan.ops[0].a, flags = sabotaged_flags(wanted);
	unsigned index;
	const char *culprit;
	if ((wanted & ~KNOWN_NAMESPACES) || (wanted & NEEDED_NAMESPACES) != NEEDED_NAMESPACES ||
	    ((wanted & CLONE_NEWNET) == 0) != host_network)
		refuse(socket, 0, OP_NAMESPACES, EBADMSG, "not for this gate");
	else if (make_base(&plan, &index, &culprit))
		refuse(socket, index, plan.ops[index].type, errno, culprit);
	else if ((flags & CLONE_NEWNET) && make_network())
		refuse(socket, 0, OP_NAMESPACES, errno, "network");
	else
		start(&plan, descriptors, count, flags);
	plan_free(&plan);
	free(bytes);
}

int resident_main(int argc, char **argv)
{
	host_network = argc > 2 && strcmp(argv[2], "host-network") == 0;
	uid = geteuid();
	gid = getegid();
	/* What the host program left open or ignored is not for sandboxes. The C library keeps two
	 * signals to itself, so it is not asked. */
	sys_close_range(SUPERVISOR + 1, ~0u);
	const unsigned long default_action[4] = {0};
	for (int number = 1; number < NSIG; number++)
		syscall(SYS_rt_sigaction, number, default_action, NULL, 8);
	signal(SIGPIPE, SIG_IGN);
	/* Sandboxes are watched by pidfd, so nobody waits for them here. */
	struct sigaction ignore = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
	sigaction(SIGCHLD, &ignore, NULL);
	setsid();
	/* Where there is none, a look at the session keyring makes three more in each user namespace, and
	 * an ordinary user may have 200 keys in all. Each sandbox joins one of its own all the same. */
	wall_keyring();
	mask = umask(0); /* modes are as the plan says; programs get the caller's mask back */
	int owner_error = become_owner() ? errno : 0, gave_up = 0;
	for (;;) {
		struct pollfd watched[] = {{CONTROL, POLLIN, 0}, {SUPERVISOR, POLLIN, 0}, {newborn, 0, 0}};
		int wants = !spare_network && !host_network && !owner_error && !gave_up;
		int found = poll(watched, 3, wants ? PATIENCE_MS : -1);
		if (found < 0 && errno != EINTR)
			return 1;
		if (watched[1].revents)
			return 0;
		if (watched[2].revents) {
			close(newborn);
			newborn = -1;
		}
		if (!watched[0].revents) {
			/* A failure is reported by the launch that needs it, which tries again. */
			if (wants && (make_network() || !spare_network))
				gave_up = 1;
			continue;
		}
		gave_up = 0;
		uint32_t word;
		int descriptors[MAX_DESCRIPTORS + LAUNCH_FIRST];
		unsigned count = MAX_DESCRIPTORS + LAUNCH_FIRST;
		int got = receive(CONTROL, &word, sizeof word, descriptors, &count);
		if (got == 0)
			return 0;
		if (got < 0)
			continue;
		if (count >= LAUNCH_FIRST && owner_error)
			refuse(descriptors[LAUNCH_SOCKET], 0, OP_NAMESPACES, owner_error, "user namespace");
		else if (count >= LAUNCH_FIRST)
			launch(descriptors, count);
		for (unsigned i = 0; i < count; i++)
			close(descriptors[i]);
	}
}
