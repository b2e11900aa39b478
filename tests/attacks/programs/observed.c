/* Opens, makes, removes, renames and executes in every way that has a corner, and prints what each gave: the same lines
 * are expected with and without an observer. With an argument it does one thing that an observer could get wrong. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* What a descriptor is: its number, type, flags, and whether it is closed by an exec. */
static void show(const char *name, int fd)
{
	struct stat info;
	if (fd < 0) {
		printf("%s: %s\n", name, strerrorname_np(errno));
		return;
	}
	fstat(fd, &info);
	printf("%s: fd %d mode %o flags %o cloexec %d size %ld\n", name, fd, info.st_mode,
	       fcntl(fd, F_GETFL) & ~0100000, fcntl(fd, F_GETFD) & FD_CLOEXEC, S_ISREG(info.st_mode) ? (long)info.st_size : 0L);
	close(fd);
}

static void tell(const char *name, long result)
{
	if (result < 0)
		printf("%s: %s\n", name, strerrorname_np(errno));
	else
		printf("%s: %ld\n", name, result);
}

/* Only the filter says EPERM: where it is missing, the call has nowhere to mount anything. */
static long refused_mount(void)
{
	return syscall(SYS_mount, NULL, NULL, NULL, 0, NULL);
}

static long open2(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve, size_t size)
{
	struct {
		struct open_how how;
		char more[64];
	} wanted = {.how = {.flags = flags, .mode = mode, .resolve = resolve}};
	return syscall(SYS_openat2, dir, path, &wanted, size ? size : sizeof wanted.how);
}

static void compare_opens(void)
{
	char long_path[PATH_MAX + 10];
	memset(long_path, 'x', sizeof long_path);
	long_path[0] = '/';
	long_path[sizeof long_path - 1] = '\0';
	show("read", open("/usr/bin/env", O_RDONLY));
	show("read, closed by exec", open("/usr/bin/env", O_RDONLY | O_CLOEXEC));
	show("nonblocking", open("/usr/bin/env", O_RDONLY | O_NONBLOCK));
	show("write what is read-only", open("/usr/bin/env", O_WRONLY));
	show("missing", open("/usr/bin/none", O_RDONLY));
	show("missing directory", open("/none/none", O_RDONLY));
	show("through a file", open("/usr/bin/env/x", O_RDONLY));
	show("empty", open("", O_RDONLY));
	show("nowhere", open((char *)8, O_RDONLY));
	show("too long", open(long_path, O_RDONLY));
	show("directory", open("/usr", O_RDONLY | O_DIRECTORY));
	show("directory, plain", open("/usr", O_RDONLY));
	show("directory, written", open("/tmp", O_RDWR));
	show("directory, made", open("/tmp", O_RDONLY | O_CREAT, 0600));
	show("file as directory", open("/usr/bin/env", O_RDONLY | O_DIRECTORY));
	show("path", open("/usr/bin/env", O_PATH));
	show("path, closed by exec", open("/usr", O_PATH | O_CLOEXEC));
	umask(027);
	show("made", open("/tmp/made", O_WRONLY | O_CREAT | O_EXCL, 0666));
	show("made again", open("/tmp/made", O_WRONLY | O_CREAT | O_EXCL, 0666));
	show("made or not", open("/tmp/made", O_RDWR | O_CREAT | O_APPEND, 0666));
	umask(0);
	show("made or not, new", open("/tmp/other", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
	umask(077);
	show("creat", creat("/tmp/third", 0777));
	int file = open("/tmp/made", O_WRONLY);
	tell("written", write(file, "12345", 5));
	close(file);
	show("kept", open("/tmp/made", O_RDONLY));
	show("emptied", open("/tmp/made", O_WRONLY | O_TRUNC));
	show("made where nothing is", open("/none/x", O_WRONLY | O_CREAT, 0600));
	show("made where it is read-only", open("/usr/x", O_WRONLY | O_CREAT, 0600));
	show("path, made", open("/usr/bin/env", O_PATH | O_CREAT | O_EXCL | O_TRUNC | O_RDWR, 0600));
	show("no name", open("/tmp", O_TMPFILE | O_RDWR, 0644));
	show("no name, read-only", open("/usr", O_TMPFILE | O_RDWR, 0644));
	show("strange flags", open("/tmp", 020000000 | O_RDWR, 0600));
	int dir = open("/tmp", O_RDONLY | O_DIRECTORY);
	show("below", openat(dir, "made", O_RDONLY));
	show("below, by a path", openat(dir, "../usr/bin/env", O_RDONLY));
	show("below a file", openat(99, "made", O_RDONLY));
	show("below nothing", openat(-5, "made", O_RDONLY));
	tell("chdir", chdir("/tmp"));
	show("here", open("made", O_RDONLY));
	show("here, by dots", open("./../tmp/./made", O_RDONLY));
	tell("symlink", symlink("made", "link"));
	tell("symlink again", symlink("made", "link"));
	tell("dangling", symlink("/none/none", "dangling"));
	tell("into proc", symlink("/proc/self/fd/0", "zero"));
	tell("directory in proc", symlink("/proc/self/fd", "fds"));
	show("link", open("link", O_RDONLY));
	show("link itself", open("link", O_RDONLY | O_NOFOLLOW));
	show("link itself, path", open("link", O_PATH | O_NOFOLLOW));
	show("dangling", open("dangling", O_RDONLY));
	show("through dangling", open("dangling/x", O_RDONLY));
	tell("dangling in tmp", symlink("/tmp/fresh", "to-fresh"));
	show("made by a link", open("to-fresh", O_WRONLY | O_CREAT, 0600));
	show("made by a link, exclusively", open("to-fresh", O_WRONLY | O_CREAT | O_EXCL, 0600));
	int nine = dup2(dir, 9);
	show("own descriptor", open("/proc/self/fd/9", O_RDONLY));
	show("own descriptor by /dev", open("/dev/fd/9", O_RDONLY));
	show("own descriptor by a link", open("fds/9", O_RDONLY));
	show("not a descriptor", open("/dev/fd/77", O_RDONLY));
	show("below an own descriptor", open("/proc/self/fd/9/made", O_RDONLY));
	show("below the own directory", open("/proc/self/cwd/made", O_RDONLY));
	show("below the own root", open("/proc/self/root/usr/bin/env", O_RDONLY));
	show("thread", open("/proc/thread-self/comm", O_RDONLY));
	show("init's memory", open("/proc/1/mem", O_RDWR));
	show("zero", open("/dev/zero", O_RDONLY));
	show("stdin", open("/dev/stdin", O_RDONLY));
	show("stdin by a link", open("zero", O_RDONLY));
	close(nine);
	struct open_how how = {0};
	(void)how;
	show("openat2", (int)open2(AT_FDCWD, "/usr/bin/env", O_RDONLY, 0, 0, 0));
	show("openat2 beneath", (int)open2(dir, "made", O_RDONLY | O_CLOEXEC, 0, RESOLVE_BENEATH, 0));
	show("openat2 beneath, out", (int)open2(dir, "../usr", O_RDONLY, 0, RESOLVE_BENEATH, 0));
	show("openat2 in root", (int)open2(dir, "/made", O_RDONLY, 0, RESOLVE_IN_ROOT, 0));
	show("openat2 no links", (int)open2(dir, "link", O_RDONLY, 0, RESOLVE_NO_SYMLINKS, 0));
	show("openat2 makes", (int)open2(dir, "by2", O_WRONLY | O_CREAT, 0666, 0, 0));
	show("openat2 strange", (int)open2(dir, "made", 1ul << 40, 0, 0, 0));
	show("openat2 mode", (int)open2(dir, "made", O_RDONLY, 0600, 0, 0));
	show("openat2 larger", (int)open2(dir, "made", O_RDONLY, 0, 0, sizeof how + 8));
	show("openat2 smaller", (int)open2(dir, "made", O_RDONLY, 0, 0, 8));
	close(dir);
}

static void compare_changes(void)
{
	umask(022);
	tell("mkdir", mkdir("/tmp/d", 0777));
	umask(077);
	tell("mkdir, slash", mkdir("/tmp/e/", 0777));
	tell("mkdir again", mkdir("/tmp/d", 0777));
	tell("mkdir dots", mkdir("/tmp/d/..", 0777));
	tell("mkdir root", mkdir("/", 0777));
	tell("mkdir nothing", mkdir("", 0777));
	tell("mkdir read-only", mkdir("/usr/d", 0777));
	tell("mkdir nowhere", mkdir("/none/d", 0777));
	tell("mkdir by proc", mkdir("/proc/self/cwd/p", 0777));
	tell("mkdir in proc", mkdir("/proc/x", 0777));
	struct stat info;
	stat("/tmp/d", &info);
	printf("mode of d %o\n", info.st_mode);
	stat("/tmp/e", &info);
	printf("mode of e %o\n", info.st_mode);
	tell("rename", rename("/tmp/other", "/tmp/d/moved"));
	tell("rename missing", rename("/tmp/other", "/tmp/d/moved"));
	tell("rename away", rename("/tmp/third", "/usr/third"));
	tell("rename directory into itself", rename("/tmp/d", "/tmp/d/x"));
	tell("rename dots", rename("/tmp/d/.", "/tmp/x"));
	tell("rename not over", renameat2(AT_FDCWD, "/tmp/third", AT_FDCWD, "/tmp/made", RENAME_NOREPLACE));
	tell("exchange", renameat2(AT_FDCWD, "/tmp/third", AT_FDCWD, "/tmp/made", RENAME_EXCHANGE));
	tell("rename strangely", renameat2(AT_FDCWD, "/tmp/third", AT_FDCWD, "/tmp/made", 1 << 20));
	tell("link", link("/tmp/third", "/tmp/linked"));
	tell("link of a link", link("/tmp/link", "/tmp/linked-link"));
	tell("link away", link("/usr/bin/env", "/tmp/env"));
	int unnamed = open("/tmp", O_TMPFILE | O_RDWR, 0600);
	char own[64];
	snprintf(own, sizeof own, "/proc/self/fd/%d", unnamed);
	tell("name a file", linkat(AT_FDCWD, own, AT_FDCWD, "/tmp/named", AT_SYMLINK_FOLLOW));
	close(unnamed);
	unnamed = open("/tmp", O_TMPFILE | O_EXCL | O_RDWR, 0600);
	snprintf(own, sizeof own, "/proc/self/fd/%d", unnamed);
	tell("name a file that never gets one", linkat(AT_FDCWD, own, AT_FDCWD, "/tmp/never", AT_SYMLINK_FOLLOW));
	close(unnamed);
	tell("unlink", unlink("/tmp/linked"));
	tell("unlink missing", unlink("/tmp/linked"));
	tell("unlink directory", unlink("/tmp/d"));
	tell("unlink link", unlink("/tmp/link"));
	tell("unlink read-only", unlink("/usr/bin/env"));
	tell("rmdir full", rmdir("/tmp/d"));
	tell("rmdir file", rmdir("/tmp/third"));
	tell("rmdir", rmdir("/tmp/e/"));
	tell("rmdir dot", rmdir("/tmp/d/."));
	tell("unlinkat strangely", unlinkat(AT_FDCWD, "/tmp/third", 0x10));
}

/* What an observer may remember of a process must change with the process: its umask and its directory, also if a child
 * that shares them changes them. */
static int change_shared(void *unused)
{
	(void)unused;
	umask(0);
	_exit(chdir("/tmp/deep/shared"));
}

static void make_some(const char *name)
{
	struct stat info;
	char path[64];
	for (int i = 0; i < 4; i++) {
		snprintf(path, sizeof path, "%s-%d", name, i);
		tell(path, mkdir(path, 0777));
		stat(path, &info);
		printf("mode %o\n", info.st_mode);
		snprintf(path, sizeof path, "%s-file-%d", name, i);
		show(path, open(path, O_WRONLY | O_CREAT | O_EXCL, 0666));
	}
	show("relative", open("made", O_RDONLY));
	show("relative", open("mark", O_RDONLY));
}

static void compare_memory_of_callers(void)
{
	static char stack[64 << 10];
	static const mode_t masks[] = {022, 077, 0, 027};
	char name[32];
	tell("chdir", chdir("/tmp"));
	tell("deep", mkdir("deep", 0777) | mkdir("deep/shared", 0777));
	close(open("deep/mark", O_WRONLY | O_CREAT, 0600));
	close(open("deep/shared/mark", O_WRONLY | O_CREAT, 0640));
	for (unsigned i = 0; i < sizeof masks / sizeof *masks; i++) {
		umask(masks[i]);
		tell("chdir", chdir(i % 2 ? "/tmp/deep" : "/tmp"));
		snprintf(name, sizeof name, "some-%u", i);
		make_some(name);
	}
	pid_t child = fork();
	if (child == 0) {
		umask(0);
		_exit(chdir("/usr"));
	}
	waitpid(child, NULL, 0);
	make_some("after-fork");
	child = clone(change_shared, stack + sizeof stack, CLONE_FS | SIGCHLD, NULL);
	waitpid(child, NULL, 0);
	make_some("after-sharing");
	int there = open("/tmp/deep", O_PATH);
	tell("fchdir", fchdir(there));
	close(there);
	make_some("after-fchdir");
	tell("nowhere", chdir("/none"));
	make_some("after-nowhere");
}

static void compare_others(void)
{
	char *const none[] = {"x", NULL};
	struct sockaddr_un local = {.sun_family = AF_UNIX};
	int one = socket(AF_UNIX, SOCK_STREAM, 0), other = socket(AF_UNIX, SOCK_STREAM, 0);
	tell("execute missing", execve("/none", none, NULL));
	tell("execute directory", execve("/usr", none, NULL));
	tell("execute data", execve("/etc/passwd", none, NULL));
	strcpy(local.sun_path, "/tmp/socket");
	tell("connect nowhere", connect(other, (struct sockaddr *)&local, sizeof local));
	tell("bind", bind(one, (struct sockaddr *)&local, sizeof local));
	tell("listen", listen(one, 1));
	tell("connect", connect(other, (struct sockaddr *)&local, sizeof local));
	strcpy(local.sun_path, "/usr/socket");
	tell("bind read-only", bind(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&local, sizeof local));
	tell("mount", refused_mount());
	tell("unshare", syscall(SYS_unshare, 1 << 30 | 1));
	tell("ptrace", syscall(SYS_ptrace, 0, 0, 0, 0));
	tell("keyctl", syscall(SYS_keyctl, 0, -3, 0));
	tell("clone3", syscall(SYS_clone3, NULL, 0));
	tell("bpf", syscall(SYS_bpf, 0, NULL, 0));
	/* Both ends of a pipe with a name wait for each other. */
	tell("mkfifo", mkfifo("/tmp/fifo", 0600));
	pid_t pid = fork();
	if (pid == 0) {
		int end = open("/tmp/fifo", O_WRONLY);
		_exit(write(end, "through", 7) == 7 ? 0 : 1);
	}
	char text[16] = "";
	int end = open("/tmp/fifo", O_RDONLY);
	tell("read", read(end, text, sizeof text));
	waitpid(pid, NULL, 0);
	printf("fifo: %s\n", text);
	show("fifo without a reader", open("/tmp/fifo", O_WRONLY | O_NONBLOCK));
	close(end);
	/* No room for a descriptor. */
	struct rlimit few = {12, 12};
	setrlimit(RLIMIT_NOFILE, &few);
	while (open("/usr/bin/env", O_RDONLY) >= 0)
		;
	tell("too many", -1);
	tell("too many, path", open("/usr", O_PATH));
	tell("too many, made", open("/tmp/too-many", O_WRONLY | O_CREAT | O_EXCL, 0600));
}

/* A thread rewrites the path between two files, both of which may be opened: what is opened is one of them. */
static char flipped[] = "/tmp/flip-a";
static volatile int flips = 1;

static void *flip(void *unused)
{
	while (flips)
		flipped[10] ^= 'a' ^ 'b';
	return unused;
}

static int rewrite(void)
{
	pthread_t thread;
	int wrong = 0;
	for (char name = 'a'; name <= 'b'; name++) {
		char path[] = "/tmp/flip-?";
		path[10] = name;
		int file = open(path, O_WRONLY | O_CREAT, 0600);
		if (write(file, &name, 1) != 1)
			return 1;
		close(file);
	}
	pthread_create(&thread, NULL, flip, NULL);
	for (int i = 0; i < 3000; i++) {
		char got = '?';
		int file = open(flipped, O_RDONLY);
		if (read(file, &got, 1) != 1 || (got != 'a' && got != 'b'))
			wrong++;
		close(file);
		refused_mount();
	}
	flips = 0;
	pthread_join(thread, NULL);
	printf("wrong: %d\n", wrong);
	return 0;
}

/* Signals arrive all the time. A call that none has picked up yet is interrupted, has had no effect, and is made again: by
 * the kernel with SA_RESTART. What the observer does for the program is never done twice. */
static volatile sig_atomic_t signals;

static void count(int number)
{
	(void)number;
	signals++;
}

static int again(int result, int *interrupted)
{
	*interrupted += result < 0 && errno == EINTR;
	return result < 0 && errno == EINTR;
}

static int storm_with(int flags)
{
	struct sigaction action = {.sa_handler = count, .sa_flags = flags};
	struct itimerval often = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
	int failed = 0, interrupted = 0, result;
	char path[64];
	signals = 0;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	for (int i = 0; i < 1500; i++) {
		snprintf(path, sizeof path, "/tmp/storm-%d", i);
		while (again(result = mkdir(path, 0700), &interrupted))
			;
		failed += result != 0;
		while (again(result = open("/usr/bin/env", O_RDONLY), &interrupted))
			;
		failed += result != 3;
		close(result);
		while (again(result = rmdir(path), &interrupted))
			;
		failed += result != 0;
		while (again(result = (int)refused_mount(), &interrupted))
			;
		failed += result != -1 || errno != EPERM;
	}
	setitimer(ITIMER_REAL, &never, NULL);
	printf("failed: %d, signals: %s", failed, signals > 10 ? "many" : "few");
	return interrupted;
}

static int storm(void)
{
	int interrupted = storm_with(SA_RESTART);
	printf(", interrupted: %d\n", interrupted);
	storm_with(0);
	putchar('\n');
	return 0;
}

/* Nothing else in the sandbox waits for a process that waits for the other end of a pipe. */
static int block(void)
{
	mkfifo("/tmp/blocked", 0600);
	for (int i = 0; i < 20; i++)
		if (fork() == 0) {
			open("/tmp/blocked", O_RDONLY);
			_exit(0);
		}
	usleep(200000);
	show("meanwhile", open("/usr/bin/env", O_RDONLY));
	return 0;
}

/* A process whose memory cannot be read goes on unobserved, and what the filter refuses stays refused. */
static int hide(void)
{
	prctl(PR_SET_DUMPABLE, 0);
	show("hidden", open("/usr/bin/env", O_RDONLY));
	tell("hidden mount", refused_mount());
	return 0;
}

/* A process that confines itself gets nothing from the observer that its own walls refuse. */
static int confine(void)
{
	struct {
		uint64_t files;
	} handled = {4 /* to read files */};
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
	/* With the mark by which the gate's own calls are spared: it hides no call of this kind. */
	tell("confined", syscall(SYS_landlock_restrict_self, rules, 0, 0, 0, 0, 0x53544b47L));
	show("read", open("/usr/bin/env", O_RDONLY));
	show("path", open("/usr/bin/env", O_PATH));
	show("made", open("/tmp/confined", O_WRONLY | O_CREAT, 0600));
	tell("mkdir", mkdir("/tmp/confined-d", 0700));
	tell("execute", mkdir("/usr/none", 0700));
	return 0;
}

/* The observer is a thread of init: it can be neither stopped nor killed. */
static int attack(void)
{
	for (int i = 0; i < 200; i++) {
		for (pid_t pid = 1; pid < 4; pid++)
			if (pid != getpid()) {
				kill(pid, SIGSTOP);
				kill(pid, SIGKILL);
				syscall(SYS_tkill, pid, SIGSTOP);
				syscall(SYS_tgkill, 1, pid, SIGKILL);
			}
	}
	show("after signals", open("/usr/bin/env", O_RDONLY));
	tell("its memory", open("/proc/1/mem", O_RDWR));
	tell("its descriptors", open("/proc/1/fd", O_RDONLY));
	tell("its thread's memory", open("/proc/1/task/2/mem", O_RDONLY) >= 0);
	return 0;
}

/* A link leads to a file and to what is the program's own in /proc by turns: what is opened is never the observer's. */
static int look_into_proc(void)
{
	static char text[1 << 20];
	static const char *const names[] = {"/proc/self/maps", "/proc/thread-self/maps", "/proc/self/../self/maps", "/tmp/to-proc/maps"};
	int foreign = 0, own = 0;
	unlink("/tmp/to-proc");
	if (symlink("/proc/self", "/tmp/to-proc"))
		return 1;
	pid_t pid = fork();
	if (pid == 0)
		for (;;) {
			symlink("/usr/bin/env", "/tmp/next");
			rename("/tmp/next", "/tmp/turning");
			symlink("/proc/self/maps", "/tmp/next");
			rename("/tmp/next", "/tmp/turning");
		}
	int proc = open("/proc", O_RDONLY | O_DIRECTORY);
	for (int i = 0; i < 4000; i++) {
		int file = i % 6 == 4 ? openat(proc, "self/maps", O_RDONLY)
				      : open(i % 6 == 5 ? names[i % 4] : i % 2 ? "/tmp/turning" : names[i % 4], i % 3 ? O_RDONLY : O_RDONLY | O_CREAT, 0600);
		if (file < 0)
			continue;
		ssize_t got = read(file, text, sizeof text - 1);
		text[got > 0 ? got : 0] = '\0';
		foreign += strstr(text, "stockade") != NULL && strstr(text, "/observed") == NULL;
		own += strstr(text, "[stack]") != NULL;
		close(file);
	}
	kill(pid, SIGKILL);
	printf("foreign: %d, own: %s\n", foreign, own > 1000 ? "many" : "few");
	return 0;
}

/* Many processes at once, each with its own calls. */
static int crowd(void)
{
	int failed = 0, status;
	for (int i = 0; i < 10000; i++) {
		if (fork() == 0) {
			int file = open("/usr/bin/env", O_RDONLY);
			_exit(file < 0 || refused_mount() != -1 || errno != EPERM);
		}
		if (i >= 30 && waitpid(-1, &status, 0) > 0)
			failed += status != 0;
	}
	while (waitpid(-1, &status, 0) > 0)
		failed += status != 0;
	printf("failed: %d\n", failed);
	return 0;
}

/* More different names than the observer has room for. */
static int flood(void)
{
	char path[PATH_MAX];
	for (int i = 0; i < 6000; i++) {
		memset(path, 0, sizeof path);
		int length = snprintf(path, 40, "/none/%08d", i);
		for (int at = length; at < 4000; at++)
			path[at] = at % 200 ? 'x' : '/';
		open(path, O_RDONLY);
	}
	refused_mount();
	puts("flooded");
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*does)(void);
	} games[] = {{"rewrite", rewrite}, {"storm", storm}, {"block", block}, {"hide", hide}, {"confine", confine},
		     {"attack", attack}, {"proc", look_into_proc}, {"crowd", crowd}, {"flood", flood}};
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; argc > 1 && i < sizeof games / sizeof *games; i++)
		if (strcmp(argv[1], games[i].name) == 0)
			return games[i].does();
	compare_opens();
	compare_changes();
	compare_memory_of_callers();
	compare_others();
	return 0;
}
