/* What this machine really lets the gate do.
 *
 * Every probe does the thing itself in a child of its own, because asking is
 * not enough: under Ubuntu's AppArmor restriction unshare() succeeds and the
 * first mount is refused; in a container a masked /proc forbids a fresh one;
 * a kernel may know Landlock and have it switched off at boot.
 *
 * Processes: the caller forks one child per probe, which may fork more. Each
 * carries PDEATHSIG=KILL (nothing here has threads), so ending the first one
 * ends them all; namespaces and the mounts in them go with their last process.
 */
#define _GNU_SOURCE
#include "fd.h"
#include "kernel.h"
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIMIT_MS 2000

/* The new mounts need a directory that exists wherever the gate can run; they
 * are made in a new mount namespace and cover it only there. */
#define SCRATCH "/dev"

struct report {
	int failed;
	int error;
	char detail[160];
};

static struct report said;

static int fails(const char *step)
{
	said.failed = 1;
	said.error = errno;
	snprintf(said.detail, sizeof said.detail, "%s", step);
	return -1;
}

/* The call went through and yet the wall is not there. */
static int no_effect(const char *what)
{
	errno = 0;
	return fails(what);
}

static pid_t start(int (*body)(void), int *answer)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return fails("pipe");
	pid_t pid = fork();
	if (pid < 0) {
		fails("fork");
		close(ends[0]);
		close(ends[1]);
		return -1;
	}
	if (pid == 0) {
		close(ends[0]);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		/* The parent may have died before the line above: its end of the pipe tells,
		 * also across a pid namespace, where getppid() is 0. */
		struct pollfd parent = {.fd = ends[1]};
		if (poll(&parent, 1, 0) != 0)
			_exit(1);
		/* A sibling may hold that end too: a child that slips through ends with the time. */
		alarm(LIMIT_MS / 1000 + 1);
		memset(&said, 0, sizeof said);
		if (body() < 0)
			said.failed = 1;
		_exit(write(ends[1], &said, sizeof said) != sizeof said);
	}
	close(ends[1]);
	*answer = ends[0];
	return pid;
}

static int finish(pid_t pid, int answer)
{
	struct pollfd ended = {.fd = answer, .events = POLLIN};
	int status = 0;
	int ready = poll(&ended, 1, LIMIT_MS);
	ssize_t got = ready > 0 ? read(answer, &said, sizeof said) : 0;

	close(answer);
	if (ready <= 0)
		kill(pid, SIGKILL);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (ready <= 0) {
		errno = ETIMEDOUT;
		return fails("no answer in time");
	}
	if (got == sizeof said)
		return said.failed ? -1 : 0;
	errno = EPERM;
	fails("the process was ended");
	if (WIFSIGNALED(status))
		snprintf(said.detail, sizeof said.detail, "ended by signal %d", WTERMSIG(status));
	return -1;
}

static int in_child(int (*body)(void))
{
	int answer = -1;
	pid_t pid = start(body, &answer);

	return pid < 0 ? -1 : finish(pid, answer);
}

static int write_file(const char *path, const char *text)
{
	owned_fd file = open(path, O_WRONLY | O_CLOEXEC);
	return file < 0 || write(file, text, strlen(text)) < 0 ? -1 : 0;
}

static int create_file(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	return fd < 0 ? -1 : close(fd);
}

static int enter_userns(void)
{
	char map[64];
	unsigned uid = geteuid(), gid = getegid();

	if (unshare(CLONE_NEWUSER) < 0)
		return fails("unshare(CLONE_NEWUSER)");
	/* A single self-mapping is what every user may write; the kernel wants setgroups closed first. */
	if (write_file("/proc/self/setgroups", "deny") < 0 && errno != ENOENT)
		return fails("write /proc/self/setgroups");
	snprintf(map, sizeof map, "%u %u 1", uid, uid);
	if (write_file("/proc/self/uid_map", map) < 0)
		return fails("write /proc/self/uid_map");
	snprintf(map, sizeof map, "%u %u 1", gid, gid);
	if (write_file("/proc/self/gid_map", map) < 0)
		return fails("write /proc/self/gid_map");
	return 0;
}

static int scratch(void)
{
	if (enter_userns() < 0)
		return -1;
	if (unshare(CLONE_NEWNS) < 0)
		return fails("unshare(CLONE_NEWNS)");
	if (mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0700") < 0)
		return fails("mount tmpfs");
	return 0;
}

static int probe_userns(void)
{
	if (scratch() < 0)
		return -1;
	return create_file(SCRATCH "/file") < 0 ? fails("write to the new tmpfs") : 0;
}

static int clone_read_only(const char *path)
{
	struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID};
	owned_fd tree = sys_open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | AT_RECURSIVE | OPEN_TREE_CLOEXEC);

	if (tree < 0)
		return fails("open_tree");
	if (sys_mount_setattr(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes) < 0)
		return fails("mount_setattr");
	return take_fd(&tree);
}

static int probe_mountapi(void)
{
	if (scratch() < 0)
		return -1;
	/* A tree of the host, with whatever is mounted in it, as the real root is built. */
	owned_fd host = clone_read_only("/usr");
	if (host < 0)
		return -1;
	/* The test that it is read-only tries to write, so it is done on a tree of the probe's own. */
	if (mkdir(SCRATCH "/from", 0700) < 0 || mkdir(SCRATCH "/to", 0700) < 0)
		return fails("mkdir");
	owned_fd tree = clone_read_only(SCRATCH "/from");
	if (tree < 0)
		return -1;
	if (sys_move_mount(tree, "", AT_FDCWD, SCRATCH "/to", MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return fails("move_mount");
	if (create_file(SCRATCH "/to/file") == 0 || errno != EROFS)
		return no_effect("a read-only mount could be written to");
	return 0;
}

static int fresh_proc(void)
{
	char self[16] = "";

	if (getpid() != 1)
		return no_effect("not process 1 of the new pid namespace");
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return fails("mount proc");
	if (readlink("/proc/self", self, sizeof self - 1) < 0)
		return fails("readlink /proc/self");
	return strcmp(self, "1") == 0 ? 0 : no_effect("the new /proc shows other processes");
}

static int probe_pidns(void)
{
	if (enter_userns() < 0)
		return -1;
	if (unshare(CLONE_NEWNS | CLONE_NEWPID) < 0)
		return fails("unshare(CLONE_NEWPID)");
	return in_child(fresh_proc);
}

static int probe_netns(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof address;
	struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	struct timeval second = {.tv_sec = 1};
	char byte = 'x';

	if (enter_userns() < 0)
		return -1;
	if (unshare(CLONE_NEWNET) < 0)
		return fails("unshare(CLONE_NEWNET)");
	int udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (udp < 0)
		return fails("socket");
	if (ioctl(udp, SIOCSIFFLAGS, &lo) < 0)
		return fails("bring lo up");
	if (setsockopt(udp, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second) < 0 ||
	    bind(udp, (struct sockaddr *)&address, length) < 0 ||
	    getsockname(udp, (struct sockaddr *)&address, &length) < 0)
		return fails("bind 127.0.0.1");
	if (sendto(udp, &byte, 1, 0, (struct sockaddr *)&address, length) != 1)
		return fails("send over 127.0.0.1");
	return recv(udp, &byte, 1, 0) == 1 ? 0 : fails("receive over 127.0.0.1");
}

/* Enters a new namespace and sees by its identity that it is a new one. */
static int own_namespace(int flag, const char *link)
{
	struct stat before, after;

	if (enter_userns() < 0)
		return -1;
	if (stat(link, &before) < 0)
		return fails(link);
	if (unshare(flag) < 0)
		return fails("unshare");
	if (stat(link, &after) < 0)
		return fails(link);
	return before.st_ino != after.st_ino ? 0 : no_effect("still in the old namespace");
}

static int probe_ipcns(void)
{
	return own_namespace(CLONE_NEWIPC, "/proc/self/ns/ipc");
}

static int probe_cgroupns(void)
{
	return own_namespace(CLONE_NEWCGROUP, "/proc/self/ns/cgroup");
}

static int probe_utsns(void)
{
	struct utsname name;

	if (own_namespace(CLONE_NEWUTS, "/proc/self/ns/uts") < 0)
		return -1;
	if (sethostname("probe", 5) < 0)
		return fails("sethostname");
	return uname(&name) == 0 && strcmp(name.nodename, "probe") == 0 ? 0 : no_effect("the host name stayed");
}

static int probe_overlay(void)
{
	static const char *const layers[] = {"/lower", "/upper", "/work", "/merged"};
	struct stat whiteout;
	char path[32];

	if (scratch() < 0)
		return -1;
	for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
		snprintf(path, sizeof path, SCRATCH "%s", layers[i]);
		if (mkdir(path, 0700) < 0)
			return fails("mkdir");
	}
	if (create_file(SCRATCH "/lower/old") < 0)
		return fails("write to the lower layer");
	if (mount("overlay", SCRATCH "/merged", "overlay", MS_NOSUID | MS_NODEV,
		  "userxattr,lowerdir=" SCRATCH "/lower,upperdir=" SCRATCH "/upper,workdir=" SCRATCH "/work") < 0)
		return fails("mount overlay");
	if (create_file(SCRATCH "/merged/new") < 0)
		return fails("write through the overlay");
	if (unlink(SCRATCH "/merged/old") < 0)
		return fails("delete through the overlay");
	if (access(SCRATCH "/lower/old", F_OK) < 0 || access(SCRATCH "/upper/new", F_OK) < 0)
		return no_effect("the lower layer was changed");
	if (lstat(SCRATCH "/upper/old", &whiteout) < 0 || !S_ISCHR(whiteout.st_mode) || whiteout.st_rdev != makedev(0, 0))
		return no_effect("a deletion left no whiteout");
	return 0;
}

static int probe_landlock(void)
{
	struct landlock_attr attr = {.handled_access_fs = LANDLOCK_READ_FILE_AND_DIR};
	int abi = sys_landlock_create_ruleset(NULL, 0, LANDLOCK_ABI_VERSION);

	if (abi < 0)
		return fails("landlock_create_ruleset");
	/* Only the first field, which every ABI has. */
	owned_fd rules = sys_landlock_create_ruleset(&attr, sizeof attr.handled_access_fs, 0);
	if (rules < 0)
		return fails("landlock_create_ruleset");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return fails("no_new_privs");
	if (sys_landlock_restrict_self(rules) < 0)
		return fails("landlock_restrict_self");
	if (open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC) >= 0 || errno != EACCES)
		return no_effect("a forbidden directory could be opened");
	snprintf(said.detail, sizeof said.detail, "%d", abi);
	return 0;
}

static int wait_for_signal(void)
{
	pause();
	return -1;
}

static pid_t outsider;

/* Signals stay in the domain: a process that was started in it can be reached, the probe's own parent cannot. */
static int scoped(void)
{
	struct landlock_attr attr = {.scoped = LANDLOCK_SCOPE_SIGNALS};
	int answer = -1;
	owned_fd rules = sys_landlock_create_ruleset(&attr, sizeof attr, 0);
	if (rules < 0)
		return fails("landlock_create_ruleset with scopes");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return fails("no_new_privs");
	if (sys_landlock_restrict_self(rules) < 0)
		return fails("landlock_restrict_self");
	if (kill(outsider, 0) == 0 || errno != EPERM)
		return no_effect("a process outside could be signalled");
	pid_t within = start(wait_for_signal, &answer);
	if (within < 0)
		return -1;
	if (kill(within, SIGKILL) < 0)
		return fails("signal a process inside");
	waitpid(within, NULL, 0);
	return 0;
}

static int probe_scopes(void)
{
	outsider = getpid();
	return in_child(scoped);
}

/* Everything passes but getppid, which has this answer. Returns what seccomp() does. */
static int install_filter(uint32_t answer, unsigned flags)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, answer),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return fails("no_new_privs");
	int result = sys_seccomp_filter(flags, &program);
	return result < 0 ? fails("seccomp(SECCOMP_SET_MODE_FILTER)") : result;
}

static int probe_seccomp(void)
{
	if (install_filter(SECCOMP_RET_ERRNO | EPERM, 0) < 0)
		return -1;
	if (syscall(SYS_getppid) != -1 || errno != EPERM)
		return no_effect("a filtered system call went through");
	return 0;
}

#define NOTIFIED_ANSWER 4711

static int ask_supervisor(void)
{
	return syscall(SYS_getppid) == NOTIFIED_ANSWER ? 0 : no_effect("the supervisor's answer did not arrive");
}

static int probe_notify(void)
{
	/* Newer kernels may have longer records than the header says: the room is for those. */
	union {
		struct seccomp_notif notification;
		char room[512];
	} in = {.room = {0}};
	union {
		struct seccomp_notif_resp answer;
		char room[512];
	} out = {.room = {0}};
	int answer = -1;
	/* The filter holds for this process too, which never calls getppid. */
	int listener = install_filter(SECCOMP_RET_USER_NOTIF, SECCOMP_FILTER_FLAG_NEW_LISTENER);

	if (listener < 0)
		return -1;
	pid_t pid = start(ask_supervisor, &answer);
	if (pid < 0)
		return -1;
	if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &in) < 0)
		return fails("receive a notification");
	out.answer.id = in.notification.id;
	out.answer.val = NOTIFIED_ANSWER;
	if (ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &out) < 0)
		return fails("answer a notification");
	return finish(pid, answer);
}

static void end(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static int probe_pidfd(void)
{
	int answer = -1;
	pid_t pid = start(wait_for_signal, &answer);

	if (pid < 0)
		return -1;
	owned_fd fd = sys_pidfd_open(pid);
	if (fd < 0)
		return fails("pidfd_open");
	struct pollfd death = {.fd = fd, .events = POLLIN};
	if (poll(&death, 1, 0) != 0)
		return no_effect("a living process looked dead");
	if (sys_pidfd_send_signal(fd, SIGKILL) < 0)
		return fails("pidfd_send_signal");
	if (poll(&death, 1, LIMIT_MS / 2) != 1)
		return no_effect("the death of a process was not seen");
	waitpid(pid, NULL, 0);
	return 0;
}

static int probe_nested(void)
{
	return enter_userns() < 0 ? -1 : enter_userns();
}

/* In a new user namespace in which `alive` tasks are. */
static int count_tasks(rlim_t alive)
{
	struct rlimit most = {.rlim_cur = alive + 1, .rlim_max = alive + 1};
	int answer = -1;

	if (setrlimit(RLIMIT_NPROC, &most) < 0)
		return fails("setrlimit(RLIMIT_NPROC)");
	/* Before 5.14 the user's processes outside were counted as well, and this one failed. */
	pid_t within = start(wait_for_signal, &answer);
	if (within < 0)
		return fails("fork within the limit");
	pid_t beyond = fork();
	int error = errno;
	if (beyond == 0)
		_exit(0);
	end(within);
	if (beyond > 0) {
		waitpid(beyond, NULL, 0);
		/* The kernel exempts the host's uid 0, whatever it is called in here. */
		return no_effect("root's tasks are not counted");
	}
	errno = error;
	return error == EAGAIN ? 0 : fails("fork beyond the limit");
}

static int probe_nproc(void)
{
	return enter_userns() < 0 ? -1 : count_tasks(1);
}

/* What the egress process does with secrets. In a user namespace, because CAP_IPC_LOCK counts only outside:
 * there RLIMIT_MEMLOCK decides for root, too. */
static int probe_memlock(void)
{
	size_t size = 64 * 1024;

	if (enter_userns() < 0)
		return -1;
	char *arena = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (arena == MAP_FAILED)
		return fails("mmap");
	if (madvise(arena, size, MADV_DONTDUMP) < 0)
		return fails("madvise(MADV_DONTDUMP)");
	if (madvise(arena, size, MADV_WIPEONFORK) < 0)
		return fails("madvise(MADV_WIPEONFORK)");
	if (mlock(arena, size) < 0)
		return fails("mlock");
	return 0;
}

/* For a gate that a helper has started as the first process of its namespaces. */
static int probe_counted(void)
{
	return count_tasks(2);
}

static const struct {
	const char *name;
	int (*body)(void);
} probes[] = {
	{"userns", probe_userns},   {"mountapi", probe_mountapi}, {"pidns", probe_pidns},
	{"netns", probe_netns},     {"ipcns", probe_ipcns},       {"utsns", probe_utsns},
	{"cgroupns", probe_cgroupns}, {"overlay", probe_overlay}, {"landlock", probe_landlock},
	{"seccomp", probe_seccomp}, {"notify", probe_notify},     {"pidfd", probe_pidfd},
	{"nested", probe_nested},   {"nproc", probe_nproc},       {"scopes", probe_scopes},
	{"memlock", probe_memlock}, {"counted", probe_counted},
};

int gate_probe(const char *name)
{
	int known = -1;

	memset(&said, 0, sizeof said);
	errno = EINVAL;
	for (size_t i = 0; known < 0 && i < sizeof probes / sizeof *probes; i++)
		if (strcmp(name, probes[i].name) == 0) {
			known = 0;
			in_child(probes[i].body);
		}
	if (known < 0)
		fails("no such probe");
	printf("%s\t%s\t%d\t%s\n", name, said.failed ? "no" : "ok", said.error, said.detail);
	/* A later probe may hang until the caller kills the gate: what is known is printed now. */
	fflush(stdout);
	return known;
}
