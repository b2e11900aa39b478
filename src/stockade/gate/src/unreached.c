/* What the kernel counted of a program's attempts to get out of a network that leads nowhere. */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NEWNET = 0x40000000 /* CLONE_NEWNET */ };

static size_t read_text(const char *path, char *text, size_t size)
{
	owned_fd file = sys_open(path, O_RDONLY);
	ssize_t got = file < 0 ? -1 : read(file, text, size - 1);
	text[got < 0 ? 0 : got] = '\0';
	return got < 0 ? 0 : (size_t)got;
}

/* A number of /proc/net/snmp, which has for each group a line of names and below it one of numbers. */
static unsigned long snmp_number(const char *text, const char *group, const char *name)
{
	const char *names = strstr(text, group), *numbers = names ? strstr(names + 1, group) : NULL;
	size_t length = strlen(name);
	while (numbers && *names && *numbers) {
		size_t word = strcspn(names, " \n"), number = strcspn(numbers, " \n");
		if (word == length && strncmp(names, name, length) == 0)
			return strtoul(numbers, NULL, 10);
		if (names[word] != ' ' || numbers[number] != ' ')
			break;
		names += word + 1;
		numbers += number + 1;
	}
	return 0;
}

/* Addresses without a route, and datagrams to ports without a receiver: mostly the look-up of a name. Nothing of
 * the host's network is counted. */
uint32_t count_unreached(const struct plan *plan)
{
	char text[8192];
	if (plan->count == 0 || !(plan->ops[0].a & NEWNET))
		return 0;
	unsigned long found = 0;
	if (read_text("/proc/self/net/snmp", text, sizeof text))
		found = snmp_number(text, "Udp: ", "NoPorts") + snmp_number(text, "Ip: ", "OutNoRoutes");
	if (read_text("/proc/self/net/snmp6", text, sizeof text)) {
		const char *six = strstr(text, "Ip6OutNoRoutes");
		found += six ? strtoul(six + strlen("Ip6OutNoRoutes"), NULL, 10) : 0;
	}
	return found > 0xffffffff ? 0xffffffff : (uint32_t)found;
}
