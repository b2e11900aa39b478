/* The warden of a sandbox without namespaces, which lets nothing outlive it.
 *
 * A pid namespace ends with its first process. Here there is none, so there are two processes instead, the
 * warden and init, which it starts, and each ends everything when the other has died. Both adopt orphans,
 * so nothing can leave by outliving its parent. Both are in a Landlock domain that keeps signals inside:
 * then kill(-1) reaches exactly what was started below, all of it at one instant, and no fork escapes.
 * Each run's keeper is in one of its own below that, and programs are in one more: they can signal neither.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

/* How long init may take beyond the grace of its programs when the supervisor is gone. */
enum { EXTRA_MS = 2000 };

int scope_signals(pid_t known)
{
	struct landlock_attr attr = {.scoped = LANDLOCK_SCOPE_SIGNALS};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
	owned_fd ruleset = sys_landlock_create_ruleset(&attr, sizeof attr, 0);
	if (ruleset < 0 || sys_landlock_restrict_self(ruleset))
		return -1;
	return confirm_signal_scope(known);
}

int confirm_signal_scope(pid_t known)
{
	/* It is of the same user: nothing but the domain can refuse this. */
	if (kill(known, 0) == 0) {
		errno = ENODATA;
		return -1;
	}
	return errno == EPERM ? 0 : -1;
}

/* Only after `scope_signals`. */
static _Noreturn void end_everything(int status)
{
	do
		kill(-1, SIGKILL);
	while (waitpid(-1, NULL, 0) > 0 || errno == EINTR);
	_exit(status);
}

/* Whether init has ended or was stopped; what it left behind is reaped. */
static int init_failed(pid_t init_pid)
{
	int status, failed = 0;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0)
		failed |= pid == init_pid;
	return failed || (pid < 0 && errno == ECHILD);
}

static _Noreturn void watch_init(pid_t init_pid, int supervisor, int word, int signals)
{
	struct pollfd watched[2] = {{signals, POLLIN, 0}, {supervisor, POLLIN, 0}};
	struct signalfd_siginfo info;
	uint64_t deadline = 0;
	for (;;) {
		uint64_t now = now_ms();
		if (deadline && now >= deadline)
			end_everything(1);
		if (poll(watched, 2, deadline ? (int)(deadline - now) : -1) < 0 && errno != EINTR)
			end_everything(1);
		if (watched[1].revents) {
			deadline = now_ms() + GRACE_MS + EXTRA_MS;
			watched[1].fd = -1;
			watched[1].revents = 0;
		}
		/* No process of the sandbox can signal the warden. */
		while (read(signals, &info, sizeof info) == sizeof info)
			if (info.ssi_signo == SIGTERM && write(word, "", 1) < 0 && errno != EAGAIN)
				end_everything(1);
		if (init_failed(init_pid))
			end_everything(0);
	}
}

/* NULL, or what failed. */
static const char *get_ready(pid_t resident, int word[2], int *signals)
{
	sigset_t heard;
	sigemptyset(&heard);
	sigaddset(&heard, SIGCHLD);
	sigaddset(&heard, SIGTERM);
	sigprocmask(SIG_BLOCK, &heard, NULL);
	signal(SIGCHLD, SIG_DFL);
	setsid();
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
		return "subreaper";
	if (pipe2(word, O_CLOEXEC | O_NONBLOCK))
		return "pipe";
	*signals = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
	if (*signals < 0)
		return "signalfd";
	return scope_signals(resident) ? "signals" : NULL;
}

void warden_main(struct init *init, pid_t resident, int supervisor)
{
	int word[2] = {-1, -1}, signals = -1;
	init->problem = get_ready(resident, word, &signals);
	init->problem_error = errno;
	init->walls.warden = getpid();
	init->runs.plain = 1;
	init->runs.from_warden = word[0];
	pid_t init_pid = fork();
	if (init_pid == 0) {
		close(word[1]);
		close(signals);
		close(supervisor); /* another comes with the launch */
		if (!init->problem && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) {
			init->problem = "subreaper";
			init->problem_error = errno;
		}
		init_main(init);
	}
	close(init->runs.to_resident);
	/* Without its domain the warden must send no signal. */
	if (init_pid < 0 || init->problem) {
		waitpid(init_pid, NULL, 0);
		_exit(1);
	}
	close(word[0]);
	watch_init(init_pid, supervisor, word[1], signals);
}
