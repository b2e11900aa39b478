/* The plan: a flat, length-checked list of records, and nothing else.
 *
 * A header, then records of the same shape: type, size, two numbers, then the
 * strings and the blob that the type calls for. The first record says which
 * namespaces; the `base` records after it make the part of the root that many
 * sandboxes share read-only. The whole plan is decoded and checked before its
 * first operation is executed.
 */
#ifndef STOCKADE_PLAN_H
#define STOCKADE_PLAN_H

#include "wire.h"

#include <stddef.h>
#include <stdint.h>

#define PLAN_MAX_STRINGS 4

/* Landlock's rights to TCP ports (ABI 4), as OP_LANDLOCK and OP_PORT have them. */
enum { NET_BIND = 1, NET_CONNECT = 2 };

struct op {
	uint32_t type;
	uint64_t a, b;
	const char *s[PLAN_MAX_STRINGS];
	const unsigned char *blob;
};

struct plan {
	unsigned count, base;
	struct op *ops;
	const unsigned char *base_bytes;
	size_t base_size;
	/* The operations before this one need nothing that only a launch brings, bar those that `plan_waits`
	 * names; their records and the base's. */
	unsigned ahead;
	size_t ahead_size;
};

/* Where and why a plan was refused. */
struct plan_error {
	unsigned index;
	const char *reason;
};

/* Decodes and checks `bytes`; the plan points into them. 0, or -1 with *error set. */
int plan_decode(const void *bytes, size_t size, unsigned descriptors, struct plan *plan,
		struct plan_error *error);
void plan_free(struct plan *plan);
/* Whether it is done at the launch wherever it stands: a cgroup comes with it, and the limits are for what is
 * started, not for the descriptors that a launch brings. */
int plan_waits(const struct op *op);
/* How far two plans begin alike: the operations that come ahead in both, and in *size their records and the base's. */
unsigned plan_common_prefix(const struct plan *one, const struct plan *other, size_t *size);
int plan_is_plain(const struct op *ops);
int plan_is_helped(const struct op *ops);
/* Whether it names the ids that are mapped: the rows of users, or of groups, and how many these are. */
unsigned plan_id_rows(const struct op *namespaces, int groups, struct id_row rows[MOST_ID_ROWS]);
/* The capabilities that its programs keep. */
uint64_t plan_keeps(const struct plan *plan);
const char *op_name(uint32_t type);

#endif
