/* Making, removing and renaming in the place of a program; and what only the program itself can do. */
#define _GNU_SOURCE
#include "observer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Splits a place into the directory that holds the name, opened, and the name with the slashes after it. Negative
 * error numbers: the kernel may see it differently. */
static int open_parent(const struct place *place, struct place *inner)
{
	size_t length = strlen(place->path), end = length;
	while (end && place->path[end - 1] == '/')
		end--;
	size_t start = end;
	while (start && place->path[start - 1] != '/')
		start--;
	if (end == 0)
		return -ELOOP; /* the root, or nothing */
	char kept = place->path[start];
	if (start) {
		place->path[start] = '\0';
		inner->dir = look_up(place->dir, place->path, O_PATH | O_DIRECTORY, 0, 0);
		place->path[start] = kept;
	} else {
		inner->dir = look_up(place->dir, ".", O_PATH | O_DIRECTORY, 0, 0);
	}
	inner->path = place->path + start;
	if (inner->dir < 0)
		return errno;
	return is_in_proc(inner->dir) ? -ELOOP : 0;
}

static int perform(const struct change *change, const struct place *one, const struct place *other)
{
	switch (change->kind) {
	case MAKE_DIRECTORY:
		return mkdirat(one->dir, one->path, (mode_t)change->mode);
	case MAKE_LINK:
		return linkat(one->dir, one->path, other->dir, other->path, 0);
	case MAKE_SYMLINK:
		return symlinkat(other->path, one->dir, one->path);
	case REMOVE:
		return unlinkat(one->dir, one->path, (int)change->flags);
	case RENAME:
		return (int)syscall(SYS_renameat2, one->dir, one->path, other->dir, other->path, change->flags);
	}
	errno = EINVAL;
	return -1;
}

void change_names(const struct seccomp_notif *call, const struct change *change)
{
	pid_t pid = (pid_t)call->pid;
	int pair = change->kind == RENAME || change->kind == MAKE_LINK;
	owned_place first = {-1, paths[0], 0}, second = {-1, paths[1], 0}, inner = {-1, NULL, 0}, inner_second = {-1, NULL, 0};
	if (find(call, change->dirs[0], change->addresses[0], 0, &first))
		return;
	if (pair && find(call, change->dirs[1], change->addresses[1], 0, &second))
		return;
	if (change->kind == MAKE_SYMLINK && read_path(pid, change->addresses[1], paths[1])) {
		go_on(call);
		return;
	}
	if (!still_waits(call))
		return;
	if (!observer.performs) {
		int error = predict_change(&first);
		observe(pid, change->action, error || !pair ? error : predict_change(&second), &first, pair ? &second : NULL);
		go_on(call);
		return;
	}
	int error = open_parent(&first, &inner);
	if (error == 0 && pair)
		error = open_parent(&second, &inner_second);
	if (change->kind == MAKE_SYMLINK)
		inner_second.path = paths[1];
	if (error < 0 || (change->kind == MAKE_DIRECTORY && take_umask(pid))) {
		go_on(call);
		return;
	}
	if (error == 0 && perform(change, &inner, &inner_second))
		error = errno;
	if (error) {
		int links = 0;
		/* The directories were opened, so that only a failure before that could be another for the program. */
		int differs = inner.dir < 0 ? may_differ(&first, &links) : pair && inner_second.dir < 0 && may_differ(&second, &links);
		if (!differs || links)
			observe(pid, change->action, error, &first, pair ? &second : NULL);
		if (differs)
			go_on(call);
		else
			answer(call, error, 0);
		return;
	}
	observe(pid, change->action, 0, &first, pair ? &second : NULL);
	answer(call, 0, 0);
}

/* The kernel opens the file before it reads the arguments (Linux 6.8), and these are nowhere: EFAULT means that
 * the file may be executed. Before, it always says so. */
void observe_execution(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags)
{
	owned_place place = {-1, paths[0], 0};
	if (find(call, dirfd, address, 0, &place))
		return;
	if (!still_waits(call))
		return;
	int error = 0, links = 0;
	owned_fd found = look_up(place.dir, place.path, O_PATH | (flags & AT_SYMLINK_NOFOLLOW ? O_NOFOLLOW : 0), 0, 0);
	if (found < 0)
		error = may_differ(&place, &links) && !links ? 0 : errno;
	else if (!is_in_proc(found) && syscall(SYS_execveat, found, "", (void *)8, NULL, AT_EMPTY_PATH) && errno != EFAULT)
		error = errno;
	if (place.path[0] || !(flags & AT_EMPTY_PATH))
		observe((pid_t)call->pid, OBSERVED_EXECUTE, error, &place, NULL);
	forget_program();
	close_place(&place);
	caller_executes((pid_t)call->pid);
	go_on(call);
}

void observe_entry(const struct seccomp_notif *call)
{
	owned_place place = {-1, paths[0], 0};
	int links = 0;
	if (find(call, AT_FDCWD, call->data.args[0], 0, &place)) {
		caller_changes((pid_t)call->pid);
		return;
	}
	owned_fd found = look_up(place.dir, place.path, O_PATH | O_DIRECTORY, 0, 0);
	int error = found < 0 ? errno : 0;
	if (found >= 0 && syscall(SYS_faccessat2, found, "", X_OK, AT_EMPTY_PATH | AT_EACCESS))
		error = errno;
	if (error && still_waits(call) && (!may_differ(&place, &links) || links))
		observe((pid_t)call->pid, OBSERVED_READ, error, &place, NULL);
	close_place(&place);
	caller_changes((pid_t)call->pid);
	go_on(call);
}

union address {
	struct sockaddr any;
	struct sockaddr_in ipv4;
	struct sockaddr_in6 ipv6;
	struct sockaddr_un local;
};

/* What the kernel says to a socket of the observer's own. Nothing is sent: a datagram socket only looks for a route. */
static int try_address(const union address *address, socklen_t size, int binds)
{
	owned_fd trial = socket(address->any.sa_family, (binds ? SOCK_STREAM : SOCK_DGRAM) | SOCK_CLOEXEC, 0);
	if (trial < 0)
		return errno;
	int result = binds ? bind(trial, &address->any, size) : connect(trial, &address->any, size);
	return result && errno != EADDRINUSE ? errno : 0;
}

static void observe_local(const struct seccomp_notif *call, const union address *address, size_t size, int binds)
{
	pid_t pid = (pid_t)call->pid;
	enum observed_action action = binds ? OBSERVED_BIND : OBSERVED_CONNECT;
	size_t length = size > offsetof(struct sockaddr_un, sun_path) ? size - offsetof(struct sockaddr_un, sun_path) : 0;
	char *text = texts[1];
	if (length && address->local.sun_path[0] == '\0') { /* an abstract name */
		snprintf(text, LONGEST, "unix:@%.*s", (int)length - 1, address->local.sun_path + 1);
		observe_text(pid, action, 0, text);
		go_on(call);
		return;
	}
	snprintf(paths[0], PATH_MAX, "%.*s", (int)length, address->local.sun_path);
	owned_place place = {-1, paths[0], 0};
	open_directory(pid, AT_FDCWD, 0, &place);
	if (length == 0 || place.dir == -1 || !still_waits(call)) {
		go_on(call);
		return;
	}
	int error = 0, links;
	if (binds) {
		error = predict_change(&place);
	} else {
		owned_fd found = look_up(place.dir, place.path, O_PATH, 0, 0);
		if (found < 0)
			error = errno;
		else if (syscall(SYS_faccessat2, found, "", W_OK, AT_EMPTY_PATH | AT_EACCESS))
			error = errno;
	}
	if (error == 0 || !may_differ(&place, &links) || links) {
		snprintf(text, LONGEST, "unix:%s", text_of(&place, texts[0]));
		observe_text(pid, action, error, text);
	}
	go_on(call);
}

void observe_address(const struct seccomp_notif *call, int binds)
{
	union address address = {0};
	char host[INET6_ADDRSTRLEN], text[INET6_ADDRSTRLEN + 16];
	size_t size = (size_t)call->data.args[2];
	if (size > sizeof address || size < sizeof address.any.sa_family) {
		go_on(call);
		return;
	}
	ssize_t got = read_memory((pid_t)call->pid, call->data.args[1], &address, size);
	if (got != (ssize_t)size) {
		if (got < 0 && errno != EFAULT)
			count_unread(call);
		else
			go_on(call);
		return;
	}
	if (!still_waits(call))
		return;
	if (address.any.sa_family == AF_UNIX) {
		observe_local(call, &address, size, binds);
		return;
	}
	if (address.any.sa_family == AF_INET && size >= sizeof address.ipv4) {
		inet_ntop(AF_INET, &address.ipv4.sin_addr, host, sizeof host);
		snprintf(text, sizeof text, "%s:%u", host, ntohs(address.ipv4.sin_port));
	} else if (address.any.sa_family == AF_INET6 && size >= sizeof address.ipv6) {
		inet_ntop(AF_INET6, &address.ipv6.sin6_addr, host, sizeof host);
		snprintf(text, sizeof text, "[%s]:%u", host, ntohs(address.ipv6.sin6_port));
	} else {
		go_on(call);
		return;
	}
	observe_text((pid_t)call->pid, binds ? OBSERVED_BIND : OBSERVED_CONNECT,
		     try_address(&address, (socklen_t)size, binds), text);
	go_on(call);
}
