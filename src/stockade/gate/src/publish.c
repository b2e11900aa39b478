/* Connections into the sandbox, for ports that it publishes.
 *
 * The supervisor may hand init a socket whose other end any process may hold. On it that process can ask for a
 * connection to a port of the sandbox's own loopback addresses, and for nothing else. Init makes the connection, because
 * a socket belongs to the network namespace that it was made in, and passes it out without waiting for it: whoever
 * asked waits until it can be written to.
 *
 * Init never blocks here. It reads a request only when the reply to it can be sent, and the socket has room for a few
 * replies, so whoever does not take them gets no more.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

static int publisher = -1;
static int is_full; /* it has no room for a reply */

void publish_close(void)
{
	close_fd(&publisher);
	is_full = 0;
}

void publish_open(const struct plan *plan, int socket)
{
	const int few_replies = 8 << 10;
	publish_close();
	/* Where the network is the host's, the connections would lead to the host. */
	if (!(plan->ops[0].a & CLONE_NEWNET) || fcntl(socket, F_SETFL, O_NONBLOCK) ||
	    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &few_replies, sizeof few_replies))
		close(socket);
	else
		publisher = socket;
}

struct pollfd publish_poll(void)
{
	return (struct pollfd){publisher, is_full ? POLLOUT : POLLIN, 0};
}

static int connect_begin(int family, uint16_t port)
{
	const struct sockaddr_in four = {
	    .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	const struct sockaddr_in6 six = {
	    .sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	int error = 0;
	socklen_t size = sizeof error;
	owned_fd end = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (end < 0)
		return -1;
	int failed = family == AF_INET ? sys_connect(end, &four, sizeof four) : sys_connect(end, &six, sizeof six);
	if (failed && errno != EINPROGRESS)
		return -1;
	/* On the loopback device the other side has mostly answered by now. */
	struct pollfd answered = {end, POLLOUT, 0};
	if (poll(&answered, 1, 0) > 0 && getsockopt(end, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error) {
		errno = error;
		return -1;
	}
	return take_fd(&end);
}

/* IPv4 unless it refuses, and then IPv6; or the one that was asked for. */
static int connect_inside(const struct request *request)
{
	if (request->kind != REQUEST_CONNECT || request->value == 0 || request->value > 0xffff ||
	    request->flags > CONNECT_IPV6 || request->wall_us) {
		errno = EBADMSG;
		return -1;
	}
	int end = request->flags == CONNECT_IPV6 ? -1 : connect_begin(AF_INET, (uint16_t)request->value);
	if (end >= 0 || request->flags == CONNECT_IPV4)
		return end;
	int error = errno;
	end = connect_begin(AF_INET6, (uint16_t)request->value);
	if (end < 0 && request->flags == CONNECT_ANY)
		errno = error; /* where both refuse, the first says why */
	return end;
}

void publish_handle(short events)
{
	struct request request;
	unsigned none = 0;
	struct pollfd room = {publisher, POLLOUT, 0};
	if (!events)
		return;
	is_full = poll(&room, 1, 0) == 0;
	if (is_full)
		return;
	if (!(events & POLLIN)) {
		if (events & (POLLERR | POLLHUP | POLLNVAL))
			publish_close();
		return;
	}
	if (receive(publisher, &request, sizeof request, NULL, &none) != 1) {
		publish_close();
		return;
	}
	owned_fd end = connect_inside(&request);
	const struct reply reply = {.kind = REPLY_CONNECTED, .error = end < 0 ? errno : 0, .index = request.grace_ms};
	if (send_reply(publisher, &reply, &end, end >= 0))
		publish_close();
}
