/* A sandbox without namespaces: whoever sees to it that nothing outlives it.
 *
 * A pid namespace ends with its first process. Here there is none, so there are two processes instead, the
 * warden and the gate that it starts, and each ends everything when the other has died. Both adopt orphans,
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

/* What the gate is given beyond the grace of its programs when the supervisor is gone. */
enum { MORE_MS = 2000 };

int keep_signals_in(pid_t known)
{
	struct landlock_attr attr = {.scoped = LANDLOCK_SCOPE_SIGNALS};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
	int ruleset = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	if (ruleset < 0)
		return -1;
	int result = (int)syscall(SYS_landlock_restrict_self, ruleset, 0);
	int error = errno;
	close(ruleset);
	errno = error;
	return result ? result : signals_stay_in(known);
}

int signals_stay_in(pid_t known)
{
	/* It is of the same user: nothing but the domain can refuse this. */
	if (kill(known, 0) == 0) {
		errno = ENODATA;
		return -1;
	}
	return errno == EPERM ? 0 : -1;
}

/* Only after `keep_signals_in`. */
static _Noreturn void end_everything(int status)
{
	do
		kill(-1, SIGKILL);
	while (waitpid(-1, NULL, 0) > 0 || errno == EINTR);
	_exit(status);
}

/* Whether the gate has ended or was stopped; what it left behind is reaped. */
static int gate_failed(pid_t gate)
{
	int status, failed = 0;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0)
		failed |= pid == gate;
	return failed || (pid < 0 && errno == ECHILD);
}

static _Noreturn void watch_over(pid_t gate, int supervisor, int word, int signals)
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
			deadline = now_ms() + GRACE_MS + MORE_MS;
			watched[1].fd = -1;
			watched[1].revents = 0;
		}
		/* Nobody inside can send us anything. */
		while (read(signals, &info, sizeof info) == sizeof info)
			if (info.ssi_signo == SIGTERM && write(word, "", 1) < 0 && errno != EAGAIN)
				end_everything(1);
		if (gate_failed(gate))
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
	return keep_signals_in(resident) ? "signals" : NULL;
}

void warden_main(struct box *box, pid_t resident, int supervisor)
{
	int word[2] = {-1, -1}, signals = -1;
	box->problem = get_ready(resident, word, &signals);
	box->problem_error = errno;
	box->warden = getpid();
	box->told = word[0];
	pid_t gate = fork();
	if (gate == 0) {
		close(word[1]);
		close(signals);
		close(supervisor); /* another comes with the launch */
		if (!box->problem && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) {
			box->problem = "subreaper";
			box->problem_error = errno;
		}
		inside_main(box);
	}
	close(box->word);
	/* Without its domain it must signal nobody. */
	if (gate < 0 || box->problem) {
		waitpid(gate, NULL, 0);
		_exit(1);
	}
	close(word[0]);
	watch_over(gate, supervisor, word[1], signals);
}
