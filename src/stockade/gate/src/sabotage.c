/* In the test build the gate leaves out one step and says nothing; the run must not start.
 * In every other build these functions are constants. */
#include "gate.h"

#ifdef GATE_SABOTAGE
#include <stdlib.h>
#include <string.h>

/* "op:INDEX", "flags:NUMBER" or "maps", as the third argument of the resident gate. */
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
#endif
