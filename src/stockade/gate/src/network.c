/* The network of a sandbox that may reach some names and addresses: nothing in it leads out.
 *
 * A sandbox with rules for the network has an empty network namespace like any other. The resident makes a child
 * for each request, which enters that namespace and routes every address to the loopback device, so that each
 * connection and datagram of a program arrives at a socket inside. The child opens these sockets, hands them to the
 * supervisor and ends. The socket's own address tells where the program wanted to go. The resident does it because
 * init has no right over the namespace, and the child because a process that has entered a user namespace cannot go
 * back.
 *
 * IPv4 and IPv6 have a listener each: on one for both, an IPv4 address would come as an IPv6 address that stands for
 * it, and who reads it would have to tell the two apart. None has a reuse option: with it a program could bind the same
 * port and take connections.
 *
 * In a template the child is a copy of the interpreter. It is made without the C library's fork, which would call what
 * the interpreter's libraries do around forks, and takes no memory from the heap, which a thread may have been
 * changing.
 *
 * Another request asks for listeners on the loopback address alone, by which the supervisor offers something to the
 * programs of any sandbox: nothing is routed for it.
 *
 * A later request may ask for more ports. Then the routes and addresses must be there, and a program may have taken a
 * port already, which is a refusal that names the port.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <linux/rtnetlink.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#ifndef SIOCGSKNS
#define SIOCGSKNS 0x894C
#endif

enum { LOOPBACK = 1 }; /* the index of the device lo in every network namespace */
enum { BACKLOG = 4096 };
/* The namespace, a listener of each family for each port, and the socket for questions. */
enum { MOST_SHOWN = 1 + 2 * MAX_PORTS + 1 };
_Static_assert(MOST_SHOWN <= 253, "one message carries no more");

/* What the child finds open. */
enum { CHILD_SOCKET = 3, CHILD_NAMESPACE };

struct family {
	unsigned char number, bits;
	unsigned char address[16];
};
static const struct family families[] = {
    {AF_INET, 32, {198, 18, 0, 2}},
    {AF_INET6, 128, {0xfd, 0x00, 0x5a, 0xfe, [15] = 2}},
};
static const unsigned char own_loopback[][16] = {{127, 0, 0, 1}, {[15] = 1}};

const char *network_problem(const struct resident_request *request, unsigned descriptors)
{
	if (descriptors != NETWORK_DESCRIPTORS)
		return "descriptors";
	if (request->count == 0 || request->count > MAX_PORTS || request->datagrams > request->count)
		return "count";
	unsigned streams = request->count - request->datagrams;
	for (unsigned i = 0; i < MAX_PORTS; i++) {
		if (i >= request->count ? request->ports[i] != 0 : request->ports[i] == 0)
			return "port";
		if (i > 0 && i < request->count && i != streams && request->ports[i] <= request->ports[i - 1])
			return "order";
	}
	return request->flags > NETWORK_LOOPBACK || (request->flags == NETWORK_LOOPBACK && request->datagrams) ? "flags" : NULL;
}

static int same_file(int one, const struct stat *other)
{
	struct stat info;
	return fstat(one, &info) == 0 && info.st_dev == other->st_dev && info.st_ino == other->st_ino;
}

/* What the namespace belongs to, unless it is the child's own, and then the namespace. The host's is refused: its
 * network would end there. */
static const char *enter(const struct stat *host)
{
	struct stat own;
	if (ioctl(CHILD_NAMESPACE, NS_GET_NSTYPE) != CLONE_NEWNET || host->st_ino == 0 || same_file(CHILD_NAMESPACE, host)) {
		errno = EINVAL;
		return "namespace";
	}
	owned_fd owner = ioctl(CHILD_NAMESPACE, NS_GET_USERNS);
	if (owner < 0 || stat("/proc/self/ns/user", &own))
		return "owner of the namespace";
	if (!same_file(owner, &own) && setns(owner, CLONE_NEWUSER))
		return "enter the user namespace";
	if (setns(CHILD_NAMESPACE, CLONE_NEWNET))
		return "enter the network namespace";
	return sabotaged_network(LEAVE_NAMESPACE) && unshare(CLONE_NEWNET) ? "sabotage" : NULL;
}

static int raise_loopback(void)
{
	struct ifreq lo = {.ifr_name = "lo"};
	owned_fd any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (any < 0 || ioctl(any, SIOCGIFFLAGS, &lo))
		return -1;
	if (lo.ifr_flags & IFF_UP)
		return 0;
	lo.ifr_flags |= IFF_UP;
	return ioctl(any, SIOCSIFFLAGS, &lo);
}

/* Where it is disabled, the kernel takes addresses and routes and drops the packets. */
static int has_ipv6(void)
{
	static const char *const switches[] = {"/proc/sys/net/ipv6/conf/all/disable_ipv6", "/proc/sys/net/ipv6/conf/lo/disable_ipv6"};
	owned_fd any = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	for (unsigned i = 0; i < 2 && any >= 0; i++) {
		char word = '1';
		owned_fd file = open(switches[i], O_RDONLY | O_CLOEXEC);
		if (file < 0 || read(file, &word, 1) != 1 || word != '0')
			return 0;
	}
	return any >= 0;
}

static int open_netlink(void)
{
	const struct timeval patience = {.tv_sec = 5};
	owned_fd netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	if (netlink < 0 || setsockopt(netlink, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience))
		return -1;
	return take_fd(&netlink);
}

struct netlink_message {
	struct nlmsghdr header;
	union {
		struct ifaddrmsg address;
		struct rtmsg route;
		struct ifinfomsg link;
	} body;
	char attributes[128];
};

static void begin_message(struct netlink_message *message, uint16_t type, uint16_t flags, size_t body)
{
	memset(message, 0, sizeof *message);
	message->header.nlmsg_type = type;
	message->header.nlmsg_flags = NLM_F_REQUEST | flags;
	message->header.nlmsg_len = (uint32_t)NLMSG_LENGTH(body);
}

static void add_attribute(struct netlink_message *message, uint16_t type, const void *data, size_t size)
{
	struct rtattr *attribute = (struct rtattr *)(void *)((char *)message + NLMSG_ALIGN(message->header.nlmsg_len));
	attribute->rta_type = type;
	attribute->rta_len = (uint16_t)RTA_LENGTH(size);
	memcpy(RTA_DATA(attribute), data, size);
	message->header.nlmsg_len = NLMSG_ALIGN(message->header.nlmsg_len) + RTA_ALIGN(attribute->rta_len);
}

/* Messages in one datagram of the kernel: enough for its dumps, which are at most 32 KiB at once. */
static union {
	struct nlmsghdr header;
	char bytes[32 << 10];
} answer;

typedef int (*look)(const struct nlmsghdr *found, void *seen);

/* Sends one message and reads what comes until its end. 0, or -1 with errno set. */
static int ask_kernel(int netlink, struct netlink_message *message, look look_at, void *seen)
{
	if (send(netlink, message, message->header.nlmsg_len, 0) < 0)
		return -1;
	for (;;) {
		ssize_t got = recv(netlink, answer.bytes, sizeof answer.bytes, MSG_TRUNC);
		if (got < 0)
			return -1;
		if ((size_t)got > sizeof answer.bytes) {
			errno = EMSGSIZE;
			return -1;
		}
		size_t left = (size_t)got;
		for (const struct nlmsghdr *at = &answer.header; NLMSG_OK(at, left); at = NLMSG_NEXT(at, left)) {
			if (at->nlmsg_type == NLMSG_DONE)
				return 0;
			if (at->nlmsg_type == NLMSG_ERROR) {
				errno = at->nlmsg_len < NLMSG_LENGTH(sizeof(struct nlmsgerr))
					    ? EBADMSG
					    : -((const struct nlmsgerr *)NLMSG_DATA(at))->error;
				return errno ? -1 : 0;
			}
			if (look_at == NULL || look_at(at, seen)) {
				errno = EBADMSG;
				return -1;
			}
		}
	}
}

static int add_address(int netlink, const struct family *family)
{
	struct netlink_message message;
	begin_message(&message, RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, sizeof message.body.address);
	message.body.address = (struct ifaddrmsg){.ifa_family = family->number,
						  .ifa_prefixlen = family->bits,
						  .ifa_flags = family->number == AF_INET6 ? IFA_F_NODAD : 0,
						  .ifa_index = LOOPBACK};
	add_attribute(&message, IFA_LOCAL, family->address, family->bits / 8);
	add_attribute(&message, IFA_ADDRESS, family->address, family->bits / 8);
	return ask_kernel(netlink, &message, NULL, NULL);
}

/* Every address is this namespace's own. */
static int add_route(int netlink, const struct family *family)
{
	const uint32_t device = LOOPBACK;
	struct netlink_message message;
	begin_message(&message, RTM_NEWROUTE, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, sizeof message.body.route);
	message.body.route = (struct rtmsg){.rtm_family = family->number,
					    .rtm_table = RT_TABLE_LOCAL,
					    .rtm_protocol = RTPROT_BOOT,
					    .rtm_scope = family->number == AF_INET ? RT_SCOPE_HOST : RT_SCOPE_UNIVERSE,
					    .rtm_type = RTN_LOCAL};
	add_attribute(&message, RTA_OIF, &device, sizeof device);
	return ask_kernel(netlink, &message, NULL, NULL);
}

/* What a dump has shown of one family. */
struct seen {
	const struct family *family;
	const unsigned char *loopback;
	unsigned routes, addresses;
};

/* The value of an attribute, if there is one of that size. */
static const void *find_attribute(const struct nlmsghdr *message, size_t body, uint16_t type, size_t size)
{
	if (message->nlmsg_len < NLMSG_SPACE(body))
		return NULL;
	size_t left = message->nlmsg_len - NLMSG_SPACE(body);
	const struct rtattr *at = (const struct rtattr *)(const void *)((const char *)message + NLMSG_SPACE(body));
	for (; RTA_OK(at, left); at = RTA_NEXT(at, left))
		if (at->rta_type == type && RTA_PAYLOAD(at) == size)
			return RTA_DATA(at);
	return NULL;
}

/* Others may be there, as the kernel makes them for some kinds of tunnels, but none that is up. */
static int look_at_link(const struct nlmsghdr *found, void *seen)
{
	const struct ifinfomsg *link = NLMSG_DATA(found);
	(void)seen;
	if (found->nlmsg_type != RTM_NEWLINK || found->nlmsg_len < NLMSG_LENGTH(sizeof *link))
		return -1;
	return link->ifi_index != LOOPBACK && (link->ifi_flags & IFF_UP) ? -1 : 0;
}

static int look_at_address(const struct nlmsghdr *found, void *seen)
{
	struct seen *known = seen;
	const struct ifaddrmsg *address = NLMSG_DATA(found);
	if (found->nlmsg_type != RTM_NEWADDR || found->nlmsg_len < NLMSG_LENGTH(sizeof *address))
		return -1;
	size_t size = known->family->bits / 8;
	const unsigned char *value = find_attribute(found, sizeof *address, IFA_ADDRESS, size);
	if (value == NULL || address->ifa_index != LOOPBACK)
		return -1;
	if (memcmp(value, known->loopback, size) == 0)
		return 0;
	if (memcmp(value, known->family->address, size) || address->ifa_prefixlen != known->family->bits)
		return -1;
	known->addresses++;
	return 0;
}

static int look_at_route(const struct nlmsghdr *found, void *seen)
{
	struct seen *known = seen;
	const struct rtmsg *route = NLMSG_DATA(found);
	if (found->nlmsg_type != RTM_NEWROUTE || found->nlmsg_len < NLMSG_LENGTH(sizeof *route))
		return -1;
	uint32_t device;
	const void *value = find_attribute(found, sizeof *route, RTA_OIF, sizeof device);
	if (value == NULL)
		return -1;
	memcpy(&device, value, sizeof device);
	if (device != LOOPBACK)
		return -1;
	known->routes += route->rtm_dst_len == 0 && route->rtm_type == RTN_LOCAL && route->rtm_table == RT_TABLE_LOCAL;
	return 0;
}

static int dump(int netlink, uint16_t type, unsigned char family, look look_at, struct seen *seen)
{
	struct netlink_message message;
	size_t body = type == RTM_GETADDR    ? sizeof message.body.address
		      : type == RTM_GETROUTE ? sizeof message.body.route
					     : sizeof message.body.link;
	begin_message(&message, type, NLM_F_DUMP, body);
	message.body.route.rtm_family = family; /* in each of them the first byte */
	return ask_kernel(netlink, &message, look_at, seen);
}

static int confirm_family(int netlink, unsigned index)
{
	struct seen seen = {.family = &families[index], .loopback = own_loopback[index]};
	if (dump(netlink, RTM_GETADDR, seen.family->number, look_at_address, &seen) ||
	    dump(netlink, RTM_GETROUTE, seen.family->number, look_at_route, &seen))
		return -1;
	errno = EBADMSG;
	return seen.routes == 1 && seen.addresses == 1 ? 0 : -1;
}

/* A network of its own, with nothing but the loopback device. */
static const char *confirm_loopback(void)
{
	owned_fd netlink = open_netlink();
	if (netlink < 0)
		return "netlink";
	if (dump(netlink, RTM_GETLINK, AF_UNSPEC, look_at_link, NULL))
		return "another device";
	return raise_loopback() ? "loopback" : NULL;
}

static const char *route_everything(unsigned count, int is_routed)
{
	owned_fd netlink = open_netlink();
	if (netlink < 0)
		return "netlink";
	if (dump(netlink, RTM_GETLINK, AF_UNSPEC, look_at_link, NULL))
		return "another device";
	if (!is_routed && raise_loopback())
		return "loopback";
	for (unsigned i = 0; i < count && !is_routed; i++) {
		if (!sabotaged_network(i ? LEAVE_ADDRESS6 : LEAVE_ADDRESS4) && add_address(netlink, &families[i]))
			return i ? "IPv6 address" : "IPv4 address";
		if (!sabotaged_network(i ? LEAVE_ROUTE6 : LEAVE_ROUTE4) && add_route(netlink, &families[i]))
			return i ? "IPv6 route" : "IPv4 route";
	}
	for (unsigned i = 0; i < count && !sabotaged_network(LEAVE_CONFIRMATION); i++)
		if (confirm_family(netlink, i))
			return i ? "IPv6 routes and addresses" : "IPv4 routes and addresses";
	return NULL;
}

static int set_option(int socket, int level, int option)
{
	const int on = 1;
	return setsockopt(socket, level, option, &on, sizeof on);
}

static int bind_to(int socket, unsigned char family, uint16_t port, uint32_t address)
{
	const struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(address)};
	const struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	if (family == AF_INET)
		return bind(socket, (const struct sockaddr *)&four, sizeof four);
	return bind(socket, (const struct sockaddr *)&six, sizeof six);
}

static int open_tcp(unsigned char family, uint16_t port, uint32_t address)
{
	owned_fd listener = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener < 0 || (family == AF_INET6 && set_option(listener, IPPROTO_IPV6, IPV6_V6ONLY)))
		return -1;
	if ((sabotaged_network(SET_REUSEPORT) && set_option(listener, SOL_SOCKET, SO_REUSEPORT)) ||
	    (sabotaged_network(SET_REUSEADDR) && set_option(listener, SOL_SOCKET, SO_REUSEADDR)))
		return -1;
	if (bind_to(listener, family, sabotaged_network(OTHER_PORT) ? port + 1 : port, address) ||
	    (!sabotaged_network(LEAVE_LISTEN) && listen(listener, BACKLOG)))
		return -1;
	return take_fd(&listener);
}

/* With the address that each datagram was sent to. An answer comes from that address, which IPv6 allows only to a
 * socket with FREEBIND. */
static int open_udp(unsigned char family, uint16_t port)
{
	owned_fd receiver = socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (receiver < 0)
		return -1;
	if (family == AF_INET ? set_option(receiver, IPPROTO_IP, IP_PKTINFO)
			      : set_option(receiver, IPPROTO_IPV6, IPV6_V6ONLY) ||
				    set_option(receiver, IPPROTO_IPV6, IPV6_RECVPKTINFO) ||
				    set_option(receiver, IPPROTO_IPV6, IPV6_FREEBIND))
		return -1;
	return bind_to(receiver, family, port, INADDR_ANY) ? -1 : take_fd(&receiver);
}

/* On it the supervisor asks which socket a connection began at. It tells of this namespace's sockets for ever. */
static int open_questions(void)
{
	return socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_SOCK_DIAG);
}

static _Noreturn void refuse_port(int error, const char *text, unsigned port)
{
	struct reply reply = {.kind = REPLY_FAILED, .error = error, .index = port};
	snprintf(reply.text, sizeof reply.text, "%s", text);
	send_reply(CHILD_SOCKET, &reply, NULL, 0);
	_exit(1);
}

static _Noreturn void refuse(int error, const char *text)
{
	refuse_port(error, text, 0);
}

static _Noreturn void child_main(const struct resident_request *request, const struct stat *host)
{
	static int shown[MOST_SHOWN];
	unsigned found = 1, streams = request->count - request->datagrams;
	const char *failed = enter(host);
	if (failed)
		refuse(errno, failed);
	int loopback = request->flags == NETWORK_LOOPBACK;
	unsigned count = 1 + (unsigned)(!loopback && has_ipv6());
	failed = loopback ? confirm_loopback() : route_everything(count, request->flags & NETWORK_MORE);
	if (failed)
		refuse(errno, failed);
	for (unsigned i = 0; i < count; i++)
		for (unsigned p = 0; p < streams; p++)
			if ((shown[found++] = open_tcp(families[i].number, request->ports[p],
						       loopback ? INADDR_LOOPBACK : INADDR_ANY)) < 0)
				refuse_port(errno, "TCP listener", request->ports[p]);
	for (unsigned i = 0; i < count; i++)
		for (unsigned p = streams; p < request->count; p++)
			if ((shown[found++] = open_udp(families[i].number, request->ports[p])) < 0)
				refuse_port(errno, "UDP listener", request->ports[p]);
	if ((shown[found++] = open_questions()) < 0)
		refuse(errno, "socket for questions about sockets");
	/* The supervisor of an ordinary user could not ask for it. */
	shown[0] = ioctl(shown[1], SIOCGSKNS);
	if (shown[0] < 0)
		refuse(errno, "namespace of the listeners");
	const struct reply reply = {.kind = REPLY_NETWORK, .status = count, .index = request->count};
	if (send_reply(CHILD_SOCKET, &reply, shown, found))
		refuse(errno, "send");
	_exit(0);
}

void network_start(const struct resident_request *request, const int *descriptors, const struct stat *host)
{
	pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0) {
		/* By way of numbers that none of them has. */
		int reply = fcntl(descriptors[NETWORK_SOCKET], F_DUPFD_CLOEXEC, CHILD_NAMESPACE + 1);
		int namespace = fcntl(descriptors[NETWORK_NAMESPACE], F_DUPFD_CLOEXEC, CHILD_NAMESPACE + 1);
		if (reply < 0 || namespace < 0 || dup3(reply, CHILD_SOCKET, O_CLOEXEC) < 0 ||
		    dup3(namespace, CHILD_NAMESPACE, O_CLOEXEC) < 0 || sys_close_range(CHILD_NAMESPACE + 1, ~0u))
			_exit(1);
		child_main(request, host);
	}
	if (pid < 0) {
		struct reply reply = {.kind = REPLY_FAILED, .error = errno, .text = "fork"};
		send_reply(descriptors[NETWORK_SOCKET], &reply, NULL, 0);
	}
}
