/* In the test build the gate leaves out one step and says nothing; the run must not start.
 * In every other build these functions are constants. */
#include "gate.h"

#ifdef GATE_SABOTAGE
#include <linux/filter.h>
#include <stdlib.h>
#include <string.h>

/* "op:INDEX", "flags:NUMBER", "maps", "join", "scopes", "filter", "seccomp:ERRNO" or "network:STEPS", as the third argument of the resident
 * gate. */
const char *sabotage_order = "";

static int ordered(const char *kind, uint64_t *number)
{
	size_t length = strlen(kind);
	if (strncmp(sabotage_order, kind, length) || sabotage_order[length] != ':')
		return 0;
	*number = strtoull(sabotage_order + length + 1, NULL, 0);
	return 1;
}

int sabotaged_op(unsigned index)
{
	uint64_t number;
	return ordered("op", &number) && number == index;
}

uint64_t sabotaged_flags(uint64_t flags)
{
	uint64_t number;
	return ordered("flags", &number) ? flags & ~number : flags;
}

int sabotaged_maps(void)
{
	return strcmp(sabotage_order, "maps") == 0;
}

int sabotaged_join(void)
{
	return strcmp(sabotage_order, "join") == 0;
}

uint64_t sabotaged_scopes(uint64_t scopes)
{
	return strcmp(sabotage_order, "scopes") ? scopes : 0;
}

/* Another filter of the same length: its last instruction gives another answer. */
void *sabotaged_filter(void *program, size_t size)
{
	if (strcmp(sabotage_order, "filter"))
		return program;
	struct sock_filter *other = malloc(size);
	memcpy(other, program, size);
	other[size / sizeof *other - 1].k ^= 1;
	return other;
}

/* The kernel's answer to the filter, where a test cannot bring it about without harm to the machine. */
int sabotaged_seccomp(void)
{
	uint64_t number;
	return ordered("seccomp", &number) ? (int)number : 0;
}

int sabotaged_network(enum network_sabotage step)
{
	uint64_t steps;
	return ordered("network", &steps) && (steps & step) != 0;
}
#else
int sabotaged_op(unsigned index)
{
	(void)index;
	return 0;
}

uint64_t sabotaged_flags(uint64_t flags)
{
	return flags;
}

int sabotaged_maps(void)
{
	return 0;
}

int sabotaged_join(void)
{
	return 0;
}

uint64_t sabotaged_scopes(uint64_t scopes)
{
	return scopes;
}

void *sabotaged_filter(void *program, size_t size)
{
	(void)size;
	return program;
}

int sabotaged_seccomp(void)
{
	return 0;
}

int sabotaged_network(enum network_sabotage step)
{
	(void)step;
	return 0;
}
#endif
