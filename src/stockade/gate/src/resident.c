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
#include <linux/nsfs.h>
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

enum { PATIENCE_MS = 5, KEPT_PLAN = 64 << 10 };

static const uint64_t NEEDED_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID;
static const uint64_t KNOWN_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
					 CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWNET;

/* Which sandboxes it is for. */
enum kind { OWN_NETWORK, HOST_NETWORK, PLAIN, HELPED };

/* The part of the root that sandboxes of one profile share. */
struct base {
	unsigned char *bytes; /* the records it was built from, NULL: there is none */
	size_t size;
};

/* The first process of the next sandbox: its namespaces are fresh, its ids mapped, and it waits for a launch. */
struct spare {
	pid_t pid; /* 0: there is none */
	int socket;
	int shown[8]; /* a pidfd and the namespaces, as the kernel has them */
	struct birth birth;
};

/* The last plan: the next one is probably of its kind. */
struct last_plan {
	unsigned char *bytes; /* NULL: there is none, or none that a process made ahead could serve */
	size_t size;
	struct plan plan;
	unsigned ahead; /* of what comes ahead, as much as the plan before began with as well */
	size_t ahead_size;
	struct birth birth;
	unsigned launches;
};

struct resident {
	enum kind kind;
	const char *sabotage; /* in the test build, for the gate that a helper starts */
	uid_t uid;
	gid_t gid;
	mode_t mask;
	struct stat host_network; /* the namespace that it was started in */
	int network_ready; /* the network namespace that it is in is fresh, and its to give away */
	/* Its end of the socket to the last sandbox that was born: in error once that has started its first program,
	 * or died. Until then idle work would take the processor that the sandbox needs. */
	int newborn;
	/* A pidfd of the same: when it has ended, a program that runs one sandbox after another has none. */
	int last_born;
	/* The sandbox before that lived when it was born: several run at once, and the next launch will not wait for
	 * one of them to end. */
	int overlapping;
	struct base base;
	struct spare spare;
	struct last_plan last;
};

static int is_mapped(const char *name)
{
	return strcmp(name, KIND_MAPPED_OWN_NETWORK) == 0 || strcmp(name, KIND_MAPPED_HOST_NETWORK) == 0;
}

static enum kind kind_of(const char *name)
{
	if (strcmp(name, KIND_HOST_NETWORK) == 0 || strcmp(name, KIND_MAPPED_HOST_NETWORK) == 0)
		return HOST_NETWORK;
	if (strcmp(name, KIND_PLAIN) == 0)
		return PLAIN;
	return strcmp(name, KIND_HELPED) == 0 ? HELPED : OWN_NETWORK;
}

/* Whether it makes the namespaces of its sandboxes itself. */
static int makes_namespaces(const struct resident *resident)
{
	return resident->kind == OWN_NETWORK || resident->kind == HOST_NETWORK;
}

static int make_network(struct resident *resident)
{
	if (resident->kind == HOST_NETWORK || resident->network_ready || !(sabotaged_flags(CLONE_NEWNET) & CLONE_NEWNET))
		return 0;
	if (unshare(CLONE_NEWNET))
		return -1;
	struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	owned_fd any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (any < 0 || ioctl(any, SIOCSIFFLAGS, &lo))
		return -1;
	resident->network_ready = 1;
	return 0;
}

/* Enters the network of a living sandbox, for the next one. Whatever network was ready is gone then. */
static int join_network(struct resident *resident, int namespace)
{
	struct stat info;
	const struct stat *host = &resident->host_network;
	errno = EINVAL;
	if (ioctl(namespace, NS_GET_NSTYPE) != CLONE_NEWNET || fstat(namespace, &info) || host->st_ino == 0 ||
	    (info.st_dev == host->st_dev && info.st_ino == host->st_ino))
		return -1;
	if (sabotaged_join())
		return make_network(resident);
	resident->network_ready = 0;
	return setns(namespace, CLONE_NEWNET);
}

/* Each group that a socket joins lengthens a list which the kernel searches under its lock of all networks. The
 * limit belongs to the network namespace that the resident is in. IPv6 has none. */
static int limit_memberships(void)
{
	static const char path[] = "/proc/sys/net/ipv4/igmp_max_memberships", wanted[] = {'0' + MOST_MEMBERSHIPS, '\n'};
	_Static_assert(MOST_MEMBERSHIPS < 10, "one digit is written");
	char found[sizeof wanted + 1] = "";
	owned_fd file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0 || write(file, wanted, sizeof wanted) != sizeof wanted)
		return -1;
	errno = EBADMSG;
	return pread(file, found, sizeof found, 0) == sizeof wanted && memcmp(found, wanted, sizeof wanted) == 0 ? 0 : -1;
}

static const char *const dispensable[] = {"/sys", "/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/hugepages"};

/* Where nothing is unshared only the groups have to be dropped, and not every user may do that. */
static int drop_groups(uid_t uid)
{
	return uid == 0 && setgroups(0, NULL) && errno != EPERM ? -1 : 0;
}

/* An ordinary user may make namespaces and mounts only in a user namespace of its own. */
static int unshare_own(uid_t uid, gid_t gid, int mapped)
{
	static const struct birth alone;
	if (uid == 0 ? setgroups(0, NULL) || unshare(CLONE_NEWNS)
		     : unshare(CLONE_NEWUSER | CLONE_NEWNS) || (mapped ? birth_await_maps() : birth_map(getpid(), &alone, uid, gid)))
		return -1;
	/* What the host mounts later is to be seen here; what is done here must never reach the host,
	 * so this comes before anything else. */
	return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL);
}

static void drop_mounts(void)
{
	/* Each sandbox begins with a copy of the resident's mounts; what no policy may grant can go. In an ordinary
	 * user's namespace these are locked in place, and stay. */
	for (unsigned i = 0; i < sizeof dispensable / sizeof *dispensable; i++)
		umount2(dispensable[i], MNT_DETACH);
}

/* A helper shows the host's devices as they are mounted here; to root, who owns them, only as nodes that cannot
 * be changed. */
static int protect_devices(uid_t uid)
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

int resident_unshare(const char *name)
{
	enum kind kind = kind_of(name);
	uid_t uid = geteuid();
	if (in_template())
		return 0; /* it was done before the interpreter was executed */
	return kind == PLAIN ? drop_groups(uid) : kind == HELPED ? protect_devices(uid) : unshare_own(uid, getegid(), is_mapped(name));
}

static void wipe_free(unsigned char *bytes, size_t size)
{
	wipe(bytes, size);
	free(bytes);
}

/* Leaves errno alone. */
static void drop_base(struct base *base, int mounted)
{
	int error = errno;
	if (mounted)
		mount_base_drop();
	wipe_free(base->bytes, base->size);
	base->bytes = NULL;
	errno = error;
}

static int build_base(struct tree *tree, const struct plan *plan, unsigned *index, const char **culprit)
{
	for (unsigned i = 1; i <= plan->base; i++) {
		*index = i;
		*culprit = plan->ops[i].s[0];
		if (!sabotaged_op(i) && mount_op(tree, &plan->ops[i], culprit))
			return -1;
		if (confirm_tree(tree, &plan->ops[i], culprit))
			return -1;
	}
	return mount_seal(tree);
}

/* 0, or -1 with errno set and the index of the operation that failed. */
static int make_base(struct base *base, const struct plan *plan, unsigned *index, const char **culprit)
{
	if (base->bytes && base->size == plan->base_size &&
	    memcmp(base->bytes, plan->base_bytes, base->size) == 0)
		return 0;
	if (base->bytes)
		drop_base(base, 1);
	*culprit = "base";
	*index = 0;
	base->size = plan->base_size;
	base->bytes = malloc(base->size + 1);
	if (base->bytes == NULL)
		return -1;
	memcpy(base->bytes, plan->base_bytes, base->size);
	struct tree tree = NO_TREE;
	int mounted = mount_base(&tree) == 0, built = mounted && build_base(&tree, plan, index, culprit) == 0;
	close_fd(&tree.root);
	if (!built)
		drop_base(base, mounted);
	return built ? 0 : -1;
}

static void refuse(int socket, unsigned index, uint32_t op, int error, const char *text)
{
	struct reply reply = {.kind = REPLY_FAILED, .op = op, .error = error, .index = index};
	snprintf(reply.text, sizeof reply.text, "%s", text);
	send_reply(socket, &reply, NULL, 0);
}

/* Leaves errno alone. */
static void forget_spare(struct spare *spare, int end)
{
	int error = errno;
	if (end)
		sys_pidfd_send_signal(spare->shown[0], SIGKILL);
	errno = error;
	close_fds(spare->shown, 8);
	spare->pid = 0;
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
static const char *make_spare(struct resident *resident, int ahead, const struct birth *birth, int cgroup)
{
	uint64_t flags = birth->flags;
	static struct init init; /* what the clone begins with */
	struct spare *spare = &resident->spare;
	int plain = resident->kind == PLAIN;
	int ends[2];
	if (birth->how & FEW_MEMBERSHIPS && limit_memberships())
		return "net.ipv4.igmp_max_memberships";
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
		return "socketpair";
	owned_fd ours = ends[0], theirs = ends[1];
	memset(spare->shown, -1, sizeof spare->shown);
	init = (struct init){
	    .launch = {.socket = -1},
	    .tree = NO_TREE,
	    .walls = NO_WALLS,
	    .runs = {.resident = resident, .to_resident = theirs, .from_warden = -1, .mask = resident->mask},
	};
	if (ahead) {
		init.launch.plan = resident->last.plan;
		init.ahead = resident->last.ahead;
	}
	struct clone_args args = {.flags = (flags & ~(uint64_t)CLONE_NEWNET) | CLONE_PIDFD,
				  .pidfd = (uintptr_t)&spare->shown[0],
				  .exit_signal = SIGCHLD};
	if (cgroup >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)cgroup;
	}
	struct rlimit before;
	if (birth_limit(birth, &before))
		return "limit of tasks";
	template_set_dumpable(1);
	pid_t own = getpid(), pid = plain ? fork() : (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0) {
		/* It needs none of the resident's descriptors: what it works with comes with the launch. */
		close_fd(&ours);
		if (dup3(theirs, OPEN_CONTROL, O_CLOEXEC) < 0)
			_exit(1);
		init.runs.to_resident = OPEN_CONTROL;
		sys_close_range(OPEN_SUPERVISOR + plain, ~0u);
		if (plain)
			warden_main(&init, own, OPEN_SUPERVISOR);
		init_main(&init);
	}
	const char *failed = pid < 0 ? "clone" : NULL;
	template_set_dumpable(0);
	if (birth->tasks)
		setrlimit(RLIMIT_NPROC, &before);
	close_fd(&theirs);
	if (!failed && plain && (spare->shown[0] = sys_pidfd_open(pid)) < 0)
		failed = "pidfd";
	if (flags & CLONE_NEWNET)
		resident->network_ready = 0;
	if (!failed && !plain && !sabotaged_maps() && birth_map(pid, birth, resident->uid, resident->gid))
		failed = "id maps";
	/* Now, because later they cannot be opened any more. */
	for (unsigned i = 1; i < 8 && !failed; i++) {
		spare->shown[i] = namespace_of(pid, spare->shown[0], i - 1);
		if (spare->shown[i] < 0)
			failed = "namespaces";
	}
	uint32_t mapped = 0;
	if (!failed && send_message(ours, &mapped, sizeof mapped, NULL, 0))
		failed = "word";
	if (failed) {
		forget_spare(spare, pid > 0);
		return failed;
	}
	spare->pid = pid;
	spare->socket = take_fd(&ours);
	spare->birth = *birth;
	return NULL;
}

/* Whether the spare has begun as this plan does. */
static int spare_fits(const struct resident *resident, const struct plan *plan, const struct birth *birth)
{
	const struct spare *spare = &resident->spare;
	const struct last_plan *last = &resident->last;
	return memcmp(&spare->birth, birth, sizeof *birth) == 0 &&
	       last->plan.base_size == plan->base_size && last->ahead_size <= plan->ahead_size &&
	       memcmp(last->plan.base_bytes, plan->base_bytes, last->ahead_size) == 0;
}

static void drop_spare(struct spare *spare)
{
	if (spare->pid == 0)
		return;
	close_fd(&spare->socket);
	forget_spare(spare, 1);
}

/* Hands the launch over to the first process of a sandbox, one that was made ahead if it suits. */
static void start(struct resident *resident, const struct plan *plan, const int *descriptors, unsigned count,
		  const struct birth *birth)
{
	struct spare *spare = &resident->spare;
	int socket = descriptors[LAUNCH_SOCKET], cgroup = -1;
	uint32_t word = 0;
	for (unsigned i = plan->base + 1; i < plan->ahead; i++)
		if (plan->ops[i].type == OP_CGROUP && plan->ops[i].a == 2 && !sabotaged_op(i))
			cgroup = descriptors[LAUNCH_FIRST + plan->ops[i].b - 1];
	if (spare->pid && (cgroup >= 0 || !spare_fits(resident, plan, birth) ||
			  send_message(spare->socket, &word, sizeof word, descriptors, count)))
		drop_spare(spare);
	if (spare->pid == 0) {
		const char *failed = NULL;
		if (birth->how & JOINS_NETWORK ? join_network(resident, descriptors[count - 1])
					       : (birth->flags & CLONE_NEWNET) && make_network(resident))
			failed = birth->how & JOINS_NETWORK ? "network to join" : "network";
		if (!failed)
			failed = make_spare(resident, 0, birth, cgroup);
		if (!failed && send_message(spare->socket, &word, sizeof word, descriptors, count)) {
			failed = "launch";
			drop_spare(spare);
		}
		if (failed) {
			refuse(socket, 0, OP_NAMESPACES, errno, failed);
			return;
		}
	}
	/* If the reply cannot be sent, the supervisor is gone; the sandbox gets no word and ends. */
	struct reply born = {.kind = REPLY_BORN, .status = (uint32_t)spare->pid};
	if (send_reply(socket, &born, spare->shown, 8) ||
	    send_message(spare->socket, &word, sizeof word, NULL, 0)) {
		drop_spare(spare);
		return;
	}
	resident->overlapping = resident->last_born >= 0;
	close_fd(&resident->newborn);
	close_fd(&resident->last_born);
	resident->newborn = take_fd(&spare->socket);
	resident->last_born = take_fd(&spare->shown[0]);
	forget_spare(spare, 0);
}

/* Keeps the plan, which from now on belongs to it. */
static void remember(struct last_plan *last, struct plan *plan, unsigned char *bytes, size_t size, const struct birth *birth)
{
	int serves = size <= KEPT_PLAN && !(birth->how & JOINS_NETWORK);
	for (unsigned i = plan->base + 1; i < plan->ahead; i++)
		if (plan->ops[i].type == OP_CGROUP && plan->ops[i].a == 2)
			serves = 0; /* the process is born there */
	last->ahead = plan->ahead;
	last->ahead_size = plan->ahead_size;
	if (last->bytes && serves)
		last->ahead = plan_common_prefix(plan, &last->plan, &last->ahead_size);
	plan_free(&last->plan);
	wipe_free(last->bytes, last->size);
	last->bytes = NULL;
	last->launches++;
	if (serves) {
		last->bytes = bytes;
		last->size = size;
		last->plan = *plan;
		last->birth = *birth;
	} else {
		last->plan = (struct plan){0};
		plan_free(plan);
		wipe_free(bytes, size);
	}
}

void resident_forget(struct resident *resident)
{
	wipe(resident->last.bytes, resident->last.size);
	wipe(resident->base.bytes, resident->base.size);
}

/* A process that started one sandbox may have no more to start; one that started two has. */
static int wants_spare(const struct resident *resident)
{
	return resident->spare.pid == 0 && makes_namespaces(resident) && resident->last.bytes &&
	       resident->last.launches > 1;
}

/* Whether something was made for the next launch. A failure is reported by the launch that needs it. A
 * network first: a spare takes longer, and the program that has just been started needs the processors. */
static int prepare_next(struct resident *resident)
{
	if (!resident->network_ready && resident->kind != HOST_NETWORK)
		return make_network(resident) == 0 && resident->network_ready;
	return make_spare(resident, 1, &resident->last.birth, -1) == NULL;
}

/* Hands the launch over to an usher. It tells the supervisor whatever there is to tell. */
static void start_helped(const struct resident *resident, const struct plan *plan, const int *descriptors, unsigned count)
{
	pid_t pid = fork();
	if (pid < 0)
		refuse(descriptors[LAUNCH_SOCKET], 0, OP_HELPER, errno, "fork");
	if (pid)
		return;
	close(OPEN_CONTROL);
	close(OPEN_SUPERVISOR);
	const struct launch launch = {.socket = descriptors[LAUNCH_SOCKET],
				      .supervisor = descriptors[LAUNCH_SUPERVISOR],
				      .descriptors = descriptors + LAUNCH_FIRST,
				      .descriptor_count = count - LAUNCH_FIRST,
				      .plan = *plan};
	usher_main(&launch, descriptors[LAUNCH_PLAN], resident->mask, resident->sabotage);
}

static void launch(struct resident *resident, const int *descriptors, unsigned count)
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
		wipe_free(bytes, size);
		return;
	}
	uint64_t wanted = plan.ops[0].a;
	struct birth birth;
	birth_read(&plan, &birth);
	unsigned index;
	const char *culprit;
	if ((resident->kind == HELPED) != plan_is_helped(plan.ops))
		refuse(socket, 0, OP_NAMESPACES, EBADMSG, "not for this gate");
	else if (resident->kind == HELPED)
		start_helped(resident, &plan, descriptors, count);
	else if (resident->kind == PLAIN ? wanted : (wanted & ~KNOWN_NAMESPACES) || (wanted & NEEDED_NAMESPACES) != NEEDED_NAMESPACES ||
	    ((wanted & CLONE_NEWNET) == 0) != (resident->kind == HOST_NETWORK))
		refuse(socket, 0, OP_NAMESPACES, EBADMSG, "not for this gate");
	else if (makes_namespaces(resident) && make_base(&resident->base, &plan, &index, &culprit))
		refuse(socket, index, plan.ops[index].type, errno, culprit);
	else {
		start(resident, &plan, descriptors, count, &birth);
		remember(&resident->last, &plan, bytes, size, &birth);
		return;
	}
	plan_free(&plan);
	wipe_free(bytes, size);
}

/* An usher has two descriptors of every source, and each of them two numbers for a moment. And when the resident
 * sends descriptors, the kernel compares its limit with all that processes of the same user have sent and that were
 * not received yet, in whatever sandbox. */
static int raise_file_limit(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit))
		return -1;
	limit.rlim_cur = limit.rlim_max;
	return setrlimit(RLIMIT_NOFILE, &limit);
}

/* Sandboxes must not inherit what the host program left open or ignored. */
static void forget_caller(void)
{
	sys_close_range(OPEN_SUPERVISOR + 1, ~0u);
	/* The C library keeps two signals to itself, so it is not asked. */
	const unsigned long default_action[4] = {0};
	for (int number = 1; number < NSIG; number++)
		syscall(SYS_rt_sigaction, number, default_action, NULL, 8);
	signal(SIGPIPE, SIG_IGN);
	/* The supervisor watches sandboxes by pidfd, so the resident waits for none. */
	struct sigaction ignore = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
	sigaction(SIGCHLD, &ignore, NULL);
	setsid();
	/* Where there is none, a look at the session keyring makes three more in each user namespace, and
	 * an ordinary user may have 200 keys in all. Each sandbox joins one of its own all the same. */
	wall_keyring();
}

static void handle_launch(struct resident *resident, int owner_error, const int *descriptors, unsigned count)
{
	if (owner_error)
		refuse(descriptors[LAUNCH_SOCKET], 0, OP_NAMESPACES, owner_error,
		       resident->kind == HELPED ? "devices" : "user namespace");
	else
		launch(resident, descriptors, count);
}

static void handle_network(const struct resident *resident, const struct resident_request *request, const int *descriptors, unsigned count)
{
	const char *problem = network_problem(request, count);
	if (problem == NULL)
		network_start(request, descriptors, &resident->host_network);
	else if (count > NETWORK_SOCKET)
		refuse(descriptors[NETWORK_SOCKET], 0, 0, EBADMSG, problem);
}

/* One message of the supervisor. 0, or -1: there will be no more. */
static int handle_request(struct resident *resident, int owner_error)
{
	struct resident_request request;
	int descriptors[MAX_DESCRIPTORS + LAUNCH_FIRST];
	unsigned count = MAX_DESCRIPTORS + LAUNCH_FIRST;
	int got = receive(OPEN_CONTROL, &request, sizeof request, descriptors, &count);
	if (got <= 0)
		return got == 0 ? -1 : 0;
	if (request.kind == RESIDENT_LAUNCH && count >= LAUNCH_FIRST)
		handle_launch(resident, owner_error, descriptors, count);
	else if (request.kind == RESIDENT_NETWORK)
		handle_network(resident, &request, descriptors, count);
	close_fds(descriptors, count);
	return 0;
}

/* Until the supervisor has ended, or no longer wants it. */
static int serve(struct resident *resident, int owner_error)
{
	int gave_up = 0;
	for (;;) {
		struct pollfd watched[] = {{OPEN_CONTROL, POLLIN, 0},
					   {OPEN_SUPERVISOR, POLLIN, 0},
					   {resident->newborn, 0, 0},
					   {resident->last_born, POLLIN, 0}};
		int wants = !owner_error && !gave_up && resident->spare.pid == 0 &&
			    (wants_spare(resident) || (!resident->network_ready && resident->kind == OWN_NETWORK));
		int at_once = resident->last_born < 0 || resident->overlapping;
		int found = poll(watched, 4, !wants ? -1 : at_once ? 0 : PATIENCE_MS);
		if (found < 0 && errno != EINTR)
			return 1;
		if (watched[1].revents)
			return 0;
		if (watched[2].revents)
			close_fd(&resident->newborn);
		if (watched[3].revents)
			close_fd(&resident->last_born);
		if (watched[0].revents) {
			gave_up = 0;
			if (handle_request(resident, owner_error))
				return 0;
		} else if (wants && !prepare_next(resident)) {
			gave_up = 1;
		}
	}
}

int resident_main(int argc, char **argv)
{
	static struct resident resident = {.newborn = -1, .last_born = -1};
	const char *kind = argc > 2 ? argv[2] : "";
	resident.kind = kind_of(kind);
	resident.sabotage = argc > 3 ? argv[3] : NULL;
	resident.uid = geteuid();
	resident.gid = getegid();
	forget_caller();
	resident.mask = umask(0); /* modes are as the plan says; programs get the caller's mask back */
	if (stat("/proc/self/ns/net", &resident.host_network))
		resident.host_network.st_ino = 0; /* then it opens no network */
	int owner_error = raise_file_limit() || resident_unshare(kind) ? errno : 0;
	if (!owner_error && makes_namespaces(&resident))
		drop_mounts();
	template_set_dumpable(0);
	return serve(&resident, owner_error);
}
