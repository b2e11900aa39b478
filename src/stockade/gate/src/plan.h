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

#include <stddef.h>
#include <stdint.h>

#define PLAN_MAGIC "STKPLAN2"
#define PLAN_MAX_SIZE (4u << 20)
#define PLAN_MAX_OPS 4096
#define PLAN_MAX_STRINGS 4

/* The numbers are shared with gate/plan.py. */
enum op_type {
	OP_NAMESPACES = 1, /* a: clone flags, b: MAPS_EVERY_ID, or else the caller's own, and MADE_BY_HELPER;
			      a = 0: none at all, a plain plan */
	OP_HOSTNAME,       /* name */
	OP_ROOT,           /* a: size in bytes of the private file system, b: its inodes; 0: the kernel's default */
	OP_DIR,            /* path; a: mode */
	OP_FILE,           /* path, blob; a: mode, b: length */
	OP_LINK,           /* path, target */
	OP_BIND,           /* path, source; a: mount attributes, b: descriptor + 1 that must be the same file */
	OP_SCRATCH,        /* path; a: mode, b: mount attributes */
	OP_PROC,           /* path */
	OP_PTS,            /* path */
	OP_OVERLAY,        /* path, lower, upper, work; a: masks | OVERLAY_PRIVATE | mount attributes << 32,
			      b: first of three descriptors + 1, or of one: then upper and work are private */
	OP_SHOW,           /* path: the same path of the base */
	OP_VIEW,           /* path, source; a: masks, b: descriptor + 1 that must be the same directory */
	OP_PIVOT,
	OP_KEYRING,
	OP_RLIMIT,     /* a: resource, b: value */
	OP_PRIVILEGES,
	OP_LANDLOCK,   /* a: handled file rights, b: handled network rights | scopes << 32 */
	OP_GRANT,      /* path; a: file rights, b: descriptor + 1 that stands for the path | GRANT_GATE */
	OP_SECCOMP,    /* blob; b: length */
	OP_MASK,       /* path in tree, tree, source of the tree; a: number of the masks that it is one of,
			  b: descriptor + 1 that must be the same directory as the source */
	OP_CGROUP,     /* a: version, b: descriptor + 1: its tasks file, or in version 2 its directory */
	OP_IMAGE,      /* a: size in bytes, b: descriptor + 1: a file system, mounted nowhere, for what programs write */
	OP_HELPER,     /* blob: the program that makes the namespaces and mounts and loads the filter, and its arguments;
			  b: length */
	OP_DEVICES,    /* path; a: mount attributes of the nodes in it */
	OP_END
};

#define MAPS_EVERY_ID 1u
/* Somebody else executes the plan as far as the pivot, and loads the filter; the gate looks at it. */
#define MADE_BY_HELPER 2u

/* For the gate alone: programs are put behind one wall more, without it. */
#define GRANT_GATE 0x100000000u

/* The changes go to the private file system, and are bounded with it. */
#define OVERLAY_PRIVATE 0x80000000u
/* With the descriptor of a view or an overlay: it is a mount of its own, without what is mounted in it. */
#define SOURCE_ALONE 0x80000000u

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

struct plan_header {
	char magic[8];
	uint32_t size;
	uint32_t count;
	uint32_t base;
	uint32_t unused;
};

struct plan_record {
	uint32_t type;
	uint32_t size;
	uint64_t a, b;
};

/* Decodes and checks `bytes`; the plan points into them. 0, or -1 with *error set. */
int plan_decode(const void *bytes, size_t size, unsigned descriptors, struct plan *plan,
		struct plan_error *error);
void plan_free(struct plan *plan);
/* Whether it is done at the launch wherever it stands: a cgroup comes with it, and the limits are for what is
 * started, not for the descriptors that a launch brings. */
int plan_waits(const struct op *op);
/* How far two plans begin alike: the operations that come ahead in both, and in *size their records and the base's. */
unsigned plan_in_common(const struct plan *one, const struct plan *other, size_t *size);
int plan_is_plain(const struct op *ops);
int plan_is_helped(const struct op *ops);
const char *op_name(uint32_t type);

#endif
