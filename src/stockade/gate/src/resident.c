/* The resident gate: clones the first process of each sandbox.
 *
 * It is small, so that a clone is cheap however large the supervising program is. Three things are
 * made ahead of a launch. The base, the part of the root that plans of one profile have in common;
 * it is read-only and built again when a plan asks for another. A network namespace, which costs more
 * than any other part of a start. And from the second launch on a spare: the whole first process of a
 * sandbox, with what the last two plans began with. Network and spare serve one sandbox and never served
 * another; a spare that does not suit the next plan is ended.
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
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { CONTROL = 3, SUPERVISOR = 4, PATIENCE_MS = 5, KEPT_PLAN = 64 << 10 };

static const uint64_t NEEDED_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID;
static const uint64_t KNOWN_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
					 CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWNET;

static int plain;        /* started for sandboxes without namespaces */
static int helped;       /* or for those that a helper makes */
static const char *sabotage; /* in the test build, for the gate that a helper starts */
static int host_network; /* started for sandboxes that share the host's network */
static int spare_network; /* the network namespace we are in is fresh and ours to give away */
/* Our end of the pipe to the last sandbox that was born: in error once its first program has been
 * started, or it died. Until then our idle work would take the processor that it needs. */
static int newborn = -1;
/* A pidfd of the same: when it has ended, a program that runs one sandbox after another has none. */
static int last_born = -1;
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

/* Where nothing can be unshared there is only the groups to let go of, and not everybody may. */
static int become_plain(void)
{
	return uid == 0 && setgroups(0, NULL) && errno != EPERM ? -1 : 0;
}

/* An ordinary user may make namespaces and mounts only in a user namespace of its own. */
static int become_owner(void)
{
	if (uid == 0 ? setgroups(0, NULL) || unshare(CLONE_NEWNS)
		     : unshare(CLONE_NEWUSER | CLONE_NEWNS) || write_maps(getpid(), 0))
		return -1;
	/* What the host mounts later is to be seen here; what is done here must never reach the host,
	 * so this comes before anything else. */
	return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL);
}

static void drop_mounts(void)
{
	/* Each sandbox begins with a copy of our mounts; what no policy may grant can go. In an ordinary
	 * user's namespace these are locked in place, and stay. */
	for (unsigned i = 0; i < sizeof dispensable / sizeof *dispensable; i++)
		umount2(dispensable[i], MNT_DETACH);
}

/* A helper shows the host's devices as they are mounted here; to root, who owns them, only as nodes that cannot
 * be changed. */
static int become_host(void)
{
	static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"};
	if (uid != 0)
		return 0;
	if (setgroups(0, NULL) || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
		return -1;
	for (unsigned i = 0; i < sizeof devices / sizeof *devices; i++)
		if (mount(devices[i], devices[i], NULL, MS_BIND, NULL) ||
		    mount(NULL, devices[i], NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL))
			return -1;
	return 0;
}

int resident_own(const char *kind)
{
	host_network = strcmp(kind, "host-network") == 0;
	plain = strcmp(kind, "plain") == 0;
	helped = strcmp(kind, "helped") == 0;
	uid = geteuid();
	gid = getegid();
	if (in_template())
		return 0; /* it was done before the interpreter was executed */
	return plain ? become_plain() : helped ? become_host() : become_owner();
}

static struct {
	unsigned char *bytes; /* the records it was built from, NULL: there is none */
	size_t size;
} base;

static void discard(unsigned char *bytes, size_t size)
{
	wipe(bytes, size);
	free(bytes);
}

static void drop_base(int mounted)
{
	if (mounted)
		mount_base_drop();
	discard(base.bytes, base.size);
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

/* The first process of the next sandbox: its namespaces are fresh, its ids mapped, and it waits for a launch. */
static struct {
	pid_t pid; /* 0: there is none */
	int socket;
	int shown[8]; /* a pidfd and the namespaces, as the kernel has them */
	uint64_t flags;
	uint64_t every;
} spare;

/* The last plan: the next one is probably of its kind. */
static struct {
	unsigned char *bytes; /* NULL: there is none, or none that a process made ahead could serve */
	size_t size;
	struct plan plan;
	unsigned ahead; /* of what comes ahead, as much as the plan before began with as well */
	size_t ahead_size;
	uint64_t flags;
	unsigned launches;
} last;

static void forget_spare(int end)
{
	if (end)
		syscall(SYS_pidfd_send_signal, spare.shown[0], SIGKILL, NULL, 0);
	for (unsigned i = 0; i < 8; i++)
		if (spare.shown[i] >= 0)
			close(spare.shown[i]);
	spare.pid = 0;
}

/* In the order in which the supervisor knows them. Looking them up in /proc takes as long as half a
 * network namespace, so the pidfd is asked where it can answer (Linux 6.11). */
int namespace_of(pid_t pid, int pidfd, unsigned index)
{
	static const struct {
		const char *name;
		unsigned char number;
	} kinds[] = {{"user", 9}, {"mnt", 3}, {"pid", 5}, {"ipc", 2}, {"uts", 10}, {"net", 4}, {"cgroup", 1}};
	char path[48];
	int found = ioctl(pidfd, _IO(0xff, kinds[index].number), 0);
	if (found >= 0 || (errno != ENOTTY && errno != EINVAL && errno != EOPNOTSUPP))
		return found;
	snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)pid, kinds[index].name);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* Clones a first process, which begins with what the last plans had in common if it is made `ahead`. NULL, or what
 * failed. */
static const char *make_spare(int ahead, uint64_t flags, uint64_t every, int cgroup)
{
	static struct box box; /* static: the clone keeps it after this frame is gone */
	int ends[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
		return "socketpair";
	memset(spare.shown, -1, sizeof spare.shown);
	box = (struct box){.socket = -1,
			   .word = ends[1],
			   .mask = mask,
			   .root = -1,
			   .upper = -1,
			   .image = -1,
			   .base = -1,
			   .canary = -1,
			   .outsider = -1,
			   .ruleset = -1,
			   .inner = -1,
			   .told = -1};
	if (ahead) {
		box.plan = last.plan;
		box.ahead = last.ahead;
	}
	struct clone_args args = {.flags = (flags & ~(uint64_t)CLONE_NEWNET) | CLONE_PIDFD,
				  .pidfd = (uintptr_t)&spare.shown[0],
				  .exit_signal = SIGCHLD};
	if (cgroup >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)cgroup;
	}
	template_dumpable(1);
	pid_t resident = getpid(), pid = plain ? fork() : (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0) {
		/* Of ours it needs nothing: what it works with comes with the launch. */
		close(ends[0]);
		if (dup3(ends[1], CONTROL, O_CLOEXEC) < 0)
			_exit(1);
		box.word = CONTROL;
		sys_close_range(SUPERVISOR + plain, ~0u);
		if (plain)
			warden_main(&box, resident, SUPERVISOR);
		inside_main(&box);
	}
	int error = errno;
	template_dumpable(0);
	close(ends[1]);
	errno = error;
	const char *failed = pid < 0 ? "clone" : NULL;
	if (!failed && plain && (spare.shown[0] = (int)syscall(SYS_pidfd_open, pid, 0)) < 0)
		failed = "pidfd";
	if (flags & CLONE_NEWNET)
		spare_network = 0;
	if (!failed && !plain && !sabotaged_maps() && write_maps(pid, every == 1))
		failed = "id maps";
	/* Now: later it cannot be looked at any more. */
	for (unsigned i = 1; i < 8 && !failed; i++) {
		spare.shown[i] = namespace_of(pid, spare.shown[0], i - 1);
		if (spare.shown[i] < 0)
			failed = "namespaces";
	}
	uint32_t mapped = 0;
	if (!failed && send_message(ends[0], &mapped, sizeof mapped, NULL, 0))
		failed = "word";
	spare.pid = pid;
	spare.socket = ends[0];
	spare.flags = flags;
	spare.every = every;
	if (failed) {
		error = errno;
		close(ends[0]);
		forget_spare(pid > 0);
		errno = error;
	}
	return failed;
}

/* Whether the spare has begun as this plan does. */
static int suits(const struct plan *plan, uint64_t flags)
{
	return spare.flags == flags && spare.every == plan->ops[0].b &&
	       last.plan.base_size == plan->base_size && last.ahead_size <= plan->ahead_size &&
	       memcmp(last.plan.base_bytes, plan->base_bytes, last.ahead_size) == 0;
}

static void drop_spare(void)
{
	if (spare.pid == 0)
		return;
	close(spare.socket);
	forget_spare(1);
}

/* Hands the launch over to the first process of a sandbox, one that was made ahead if it suits. */
static void start(const struct plan *plan, const int *descriptors, unsigned count, uint64_t flags)
{
	int socket = descriptors[LAUNCH_SOCKET], cgroup = -1;
	uint32_t word = 0;
	for (unsigned i = plan->base + 1; i < plan->ahead; i++)
		if (plan->ops[i].type == OP_CGROUP && plan->ops[i].a == 2 && !sabotaged_op(i))
			cgroup = descriptors[LAUNCH_FIRST + plan->ops[i].b - 1];
	if (spare.pid && (cgroup >= 0 || !suits(plan, flags) ||
			  send_message(spare.socket, &word, sizeof word, descriptors, count)))
		drop_spare();
	if (spare.pid == 0) {
		const char *failed = NULL;
		if ((flags & CLONE_NEWNET) && make_network())
			failed = "network";
		if (!failed)
			failed = make_spare(0, flags, plan->ops[0].b, cgroup);
		if (!failed && send_message(spare.socket, &word, sizeof word, descriptors, count)) {
			failed = "launch";
			drop_spare();
		}
		if (failed) {
			refuse(socket, 0, OP_NAMESPACES, errno, failed);
			return;
		}
	}
	/* A supervisor that cannot be told is gone, and the sandbox, which hears no word, with it. */
	struct reply born = {.kind = REPLY_BORN, .status = (uint32_t)spare.pid};
	if (send_reply(socket, &born, spare.shown, 8) ||
	    send_message(spare.socket, &word, sizeof word, NULL, 0)) {
		drop_spare();
		return;
	}
	if (newborn >= 0)
		close(newborn);
	if (last_born >= 0)
		close(last_born);
	newborn = spare.socket;
	last_born = spare.shown[0];
	spare.shown[0] = -1;
	forget_spare(0);
}

/* Keeps the plan, which from now on belongs to `last`. */
static void remember(struct plan *plan, unsigned char *bytes, size_t size, uint64_t flags)
{
	int serves = size <= KEPT_PLAN;
	for (unsigned i = plan->base + 1; i < plan->ahead; i++)
		if (plan->ops[i].type == OP_CGROUP && plan->ops[i].a == 2)
			serves = 0; /* the process is born there */
	last.ahead = plan->ahead;
	last.ahead_size = plan->ahead_size;
	if (last.bytes && serves)
		last.ahead = plan_in_common(plan, &last.plan, &last.ahead_size);
	plan_free(&last.plan);
	discard(last.bytes, last.size);
	last.bytes = NULL;
	last.launches++;
	if (serves) {
		last.bytes = bytes;
		last.size = size;
		last.plan = *plan;
		last.flags = flags;
	} else {
		last.plan = (struct plan){0};
		plan_free(plan);
		discard(bytes, size);
	}
}

void resident_forget(void)
{
	wipe(last.bytes, last.size);
	wipe(base.bytes, base.size);
}

/* A process that started one sandbox may have no more to start; one that started two has. */
static int wants_spare(void)
{
	return spare.pid == 0 && !plain && !helped && last.bytes && last.launches > 1;
}

/* Whether something was made for the next launch. A failure is reported by the launch that needs it. A
 * network first: a spare takes longer, and the program that has just been started needs the processors. */
static int get_ahead(void)
{
	if (!spare_network && !host_network)
		return make_network() == 0 && spare_network;
	return make_spare(1, last.flags, last.plan.ops[0].b, -1) == NULL;
}

/* Hands the launch over to an usher. It tells the supervisor whatever there is to tell. */
static void start_helped(const struct plan *plan, const int *descriptors, unsigned count)
{
	static struct box box;
	pid_t pid = fork();
	if (pid < 0)
		refuse(descriptors[LAUNCH_SOCKET], 0, OP_HELPER, errno, "fork");
	if (pid)
		return;
	close(CONTROL);
	close(SUPERVISOR);
	box = (struct box){.socket = descriptors[LAUNCH_SOCKET],
			   .supervisor = descriptors[LAUNCH_SUPERVISOR],
			   .descriptors = descriptors + LAUNCH_FIRST,
			   .descriptor_count = count - LAUNCH_FIRST,
			   .plan = *plan,
			   .mask = mask};
	usher_main(&box, descriptors[LAUNCH_PLAN], sabotage);
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
		discard(bytes, size);
		return;
	}
	uint64_t wanted = plan.ops[0].a, flags = sabotaged_flags(wanted);
	unsigned index;
	const char *culprit;
	if (helped != plan_is_helped(plan.ops))
		refuse(socket, 0, OP_NAMESPACES, EBADMSG, "not for this gate");
	else if (helped)
		start_helped(&plan, descriptors, count);
	else if (plain ? wanted : (wanted & ~KNOWN_NAMESPACES) || (wanted & NEEDED_NAMESPACES) != NEEDED_NAMESPACES ||
	    ((wanted & CLONE_NEWNET) == 0) != host_network)
		refuse(socket, 0, OP_NAMESPACES, EBADMSG, "not for this gate");
	else if (!plain && make_base(&plan, &index, &culprit))
		refuse(socket, index, plan.ops[index].type, errno, culprit);
	else {
		start(&plan, descriptors, count, flags);
		remember(&plan, bytes, size, flags);
		return;
	}
	plan_free(&plan);
	discard(bytes, size);
}

/* An usher has two descriptors of every source, and each of them two numbers for a moment. And what programs of the
 * same user have sent and nobody received, in whatever sandbox, is compared with our limit when we send. */
static int make_room(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit))
		return -1;
	limit.rlim_cur = limit.rlim_max;
	return setrlimit(RLIMIT_NOFILE, &limit);
}

int resident_main(int argc, char **argv)
{
	const char *kind = argc > 2 ? argv[2] : "";
	sabotage = argc > 3 ? argv[3] : NULL;
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
	int owner_error = make_room() || resident_own(kind) ? errno : 0, gave_up = 0;
	if (!owner_error && !plain && !helped)
		drop_mounts();
	template_dumpable(0);
	for (;;) {
		struct pollfd watched[] = {
		    {CONTROL, POLLIN, 0}, {SUPERVISOR, POLLIN, 0}, {newborn, 0, 0}, {last_born, POLLIN, 0}};
		int wants = !owner_error && !gave_up && spare.pid == 0 &&
			    (wants_spare() || (!spare_network && !host_network && !plain && !helped));
		int found = poll(watched, 4, !wants ? -1 : last_born < 0 ? 0 : PATIENCE_MS);
		if (found < 0 && errno != EINTR)
			return 1;
		if (watched[1].revents)
			return 0;
		if (watched[2].revents) {
			close(newborn);
			newborn = -1;
		}
		if (watched[3].revents) {
			close(last_born);
			last_born = -1;
		}
		if (!watched[0].revents) {
			if (wants && !get_ahead())
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
			refuse(descriptors[LAUNCH_SOCKET], 0, OP_NAMESPACES, owner_error, helped ? "devices" : "user namespace");
		else if (count >= LAUNCH_FIRST)
			launch(descriptors, count);
		for (unsigned i = 0; i < count; i++)
			close(descriptors[i]);
	}
}
