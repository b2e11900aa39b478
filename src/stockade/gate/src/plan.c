/* Decoding and checking a plan. No side effects: this file is what the fuzzer drives. */
#include "plan.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MASKS = 1024, NOEXEC = 8 /* MOUNT_ATTR_NOEXEC */ };
enum { PATHS = 1, BLOB = 2, ONCE = 4, NEEDED = 8, BASE = 16, AHEAD = 32, PLAIN = 64 /* also without namespaces */ };
enum { ROWS = 128 /* of ids, as many as its number says */ };
enum { CAP_KILL = 1 << 5, CAP_SETGID = 1 << 6, CAP_SETUID = 1 << 7, NEWNET = 0x40000000 /* CLONE_NEWNET */ };
enum { HELPED = 1 /* by a helper as well */, ONLY_HELPED = 2 };

/* `rank` fixes the order of the stages: a plan may never go back to an earlier one, so
 * no mount is made after the walls are up and no wall is left for after the filter. */
static const struct shape {
	const char *name;
	unsigned char strings, rank, flags, helped;
} shapes[OP_END] = {
	[OP_NAMESPACES] = {"namespaces", 0, 0, ONCE | NEEDED | PLAIN | ROWS, HELPED},
	[OP_HOSTNAME] = {"hostname", 1, 1, ONCE | AHEAD, HELPED},
	[OP_ROOT] = {"root", 0, 2, ONCE | NEEDED | AHEAD, HELPED},
	[OP_IMAGE] = {"image", 0, 2, ONCE},
	[OP_DIR] = {"dir", 1, 3, PATHS | BASE | AHEAD, HELPED},
	[OP_FILE] = {"file", 1, 3, PATHS | BLOB | BASE | AHEAD, HELPED},
	[OP_LINK] = {"link", 2, 3, PATHS | BASE | AHEAD, HELPED},
	[OP_BIND] = {"bind", 2, 3, PATHS | BASE, HELPED},
	[OP_SCRATCH] = {"scratch", 1, 3, PATHS | AHEAD, HELPED},
	[OP_PROC] = {"proc", 1, 3, PATHS | AHEAD, HELPED},
	[OP_PTS] = {"pts", 1, 3, PATHS | AHEAD},
	[OP_OVERLAY] = {"overlay", 4, 3, PATHS, HELPED},
	[OP_SHOW] = {"show", 1, 3, PATHS | AHEAD},
	[OP_VIEW] = {"view", 2, 3, PATHS, HELPED},
	[OP_MASK] = {"mask", 3, 3, PATHS},
	[OP_HELPER] = {"helper", 0, 1, ONCE | BLOB, HELPED | ONLY_HELPED},
	[OP_DEVICES] = {"devices", 1, 3, PATHS | ONCE, HELPED | ONLY_HELPED},
	[OP_PLACE] = {"place", 1, 3, PATHS, HELPED | ONLY_HELPED},
	[OP_CGROUP] = {"cgroup", 0, 1, AHEAD | PLAIN, HELPED},
	[OP_PIVOT] = {"pivot", 0, 4, ONCE | NEEDED | AHEAD, HELPED},
	[OP_KEYRING] = {"keyring", 0, 5, ONCE | AHEAD | PLAIN, HELPED},
	[OP_RLIMIT] = {"rlimit", 0, 6, AHEAD | PLAIN, HELPED},
	[OP_PRIVILEGES] = {"privileges", 0, 7, ONCE | NEEDED | AHEAD | PLAIN, HELPED},
	[OP_LANDLOCK] = {"landlock", 0, 8, ONCE | NEEDED | AHEAD | PLAIN, HELPED},
	[OP_GRANT] = {"grant", 1, 9, PATHS | AHEAD | PLAIN, HELPED},
	[OP_PORT] = {"port", 0, 9, AHEAD | PLAIN, HELPED},
	[OP_OBSERVE] = {"observe", 0, 10, ONCE | BLOB | PLAIN},
	[OP_SECCOMP] = {"seccomp", 0, 11, ONCE | NEEDED | BLOB | AHEAD | PLAIN, HELPED},
};

const char *op_name(uint32_t type)
{
	return type > 0 && type < OP_END ? shapes[type].name : "plan";
}

/* Absolute and already normal: what the plan names is what the kernel will walk. */
static int is_plain_path(const char *path)
{
	if (path[0] != '/' || strlen(path) >= PATH_MAX)
		return 0;
	if (path[1] == '\0')
		return 1;
	for (const char *part = path; *part;) {
		part++; /* the slash */
		size_t length = strcspn(part, "/");
		if (length == 0 || length > NAME_MAX || (length == 1 && part[0] == '.') ||
		    (length == 2 && part[0] == '.' && part[1] == '.'))
			return 0;
		part += length;
	}
	return 1;
}

/* Whether the path lies in the tree; both are plain. */
static int is_below(const char *path, const char *tree)
{
	size_t length = strlen(tree);
	return length > 1 && strncmp(path, tree, length) == 0 && path[length] == '/';
}

/* Whether the descriptor of a source was passed, if one is named. */
static int was_passed(uint64_t number, unsigned descriptors)
{
	return number != SOURCE_ALONE && (number & ~(uint64_t)SOURCE_ALONE) <= descriptors;
}

static unsigned count_rows(const struct op *op, int groups)
{
	return op->b >> (groups ? GROUP_ROWS_AT : USER_ROWS_AT) & 0xff;
}

unsigned plan_id_rows(const struct op *namespaces, int groups, struct id_row rows[MOST_ID_ROWS])
{
	unsigned count = count_rows(namespaces, groups), before = groups ? count_rows(namespaces, 0) : 0;
	if (count)
		memcpy(rows, namespaces->blob + before * sizeof *rows, count * sizeof *rows);
	return count;
}

static int overlap(uint32_t one, uint32_t one_count, uint32_t other, uint32_t other_count)
{
	return one < (uint64_t)other + other_count && other < (uint64_t)one + one_count;
}

/* The last id of all means none. */
static const char *check_rows(const struct op *op, int groups)
{
	struct id_row rows[MOST_ID_ROWS];
	unsigned count = plan_id_rows(op, groups, rows);
	for (unsigned i = 0; i < count; i++) {
		const struct id_row *row = &rows[i];
		if (row->count == 0 || (uint64_t)row->inside + row->count > NO_ID || (uint64_t)row->outside + row->count > NO_ID)
			return "not a range of ids";
		for (unsigned j = 0; j < i; j++)
			if (overlap(row->inside, row->count, rows[j].inside, rows[j].count) ||
			    overlap(row->outside, row->count, rows[j].outside, rows[j].count))
				return "an id is mapped twice";
	}
	return NULL;
}

static const char *check_namespaces(const struct op *op, unsigned descriptors)
{
	unsigned users = count_rows(op, 0), groups = count_rows(op, 1);
	const char *wrong = NULL;
	if ((uint32_t)op->b & ~(MAPS_EVERY_ID | MADE_BY_HELPER | JOINS_NETWORK | FEW_MEMBERSHIPS) || op->b >> (GROUP_ROWS_AT + 8))
		return "unknown flags";
	if ((users == 0) != (groups == 0))
		return "users and groups are mapped together";
	if (users && (op->a == 0 || op->b & MAPS_EVERY_ID))
		return "no namespace for these ids";
	if ((op->b & JOINS_NETWORK) && !(op->a & NEWNET))
		return "no network to join";
	if ((op->b & FEW_MEMBERSHIPS) && (op->b & MADE_BY_HELPER || !(op->a & NEWNET)))
		return "no network of its own to limit memberships in";
	if ((op->b & JOINS_NETWORK) && descriptors == 0)
		return "names a descriptor that was not passed";
	wrong = check_rows(op, 0);
	return wrong ? wrong : check_rows(op, 1);
}

/* Programs that may become another user are ended by init, which has no other right over them. */
static const char *check_kept(uint64_t keep)
{
	if (keep & ~(uint64_t)KEEPABLE)
		return "a capability that no program keeps";
	return (keep & (CAP_SETUID | CAP_SETGID)) && !(keep & CAP_KILL) ? "programs of other users could not be ended" : NULL;
}

static const char *check(const struct op *op, unsigned descriptors)
{
	unsigned paths = op->type == OP_LINK ? 1 : shapes[op->type].strings;
	if (shapes[op->type].flags & PATHS)
		for (unsigned i = 0; i < paths; i++)
			if (!is_plain_path(op->s[i]))
				return "not an absolute, normal path";
	switch (op->type) {
	case OP_NAMESPACES:
		return check_namespaces(op, descriptors);
	case OP_PRIVILEGES:
		return check_kept(op->a);
	case OP_HELPER:
		if (op->b == 0 || op->blob[0] != '/' || op->blob[op->b - 1] != '\0')
			return "not a program and its arguments";
		break;
	case OP_ROOT:
		/* To the kernel no inodes mean any number of them. */
		if ((op->a == 0) != (op->b == 0))
			return "a size and a number of inodes go together";
		break;
	case OP_MASK:
		if (op->a == 0 || op->a > MAX_MASKS)
			return "not a number of masks";
		if (!is_below(op->s[0], op->s[1]))
			return "not in its tree";
		if (op->b > descriptors)
			return "names a descriptor that was not passed";
		break;
	case OP_VIEW:
		if (op->a > MAX_MASKS)
			return "not a number of masks";
		if (!was_passed(op->b, descriptors))
			return "names a descriptor that was not passed";
		break;
	case OP_BIND:
		if (op->b > descriptors)
			return "names a descriptor that was not passed";
		break;
	case OP_SCRATCH:
		if (op->b & ~(uint64_t)NOEXEC)
			return "unknown mount attributes";
		break;
	case OP_OVERLAY:
		if ((op->a & 0xffffffff & ~(uint64_t)OVERLAY_PRIVATE) > MAX_MASKS)
			return "not a number of masks";
		if (op->a >> 32 & ~(uint64_t)NOEXEC)
			return "unknown mount attributes";
		if (op->b == 0 || !was_passed(op->b, descriptors) ||
		    (!(op->a & OVERLAY_PRIVATE) && descriptors - (op->b & ~(uint64_t)SOURCE_ALONE) < 2))
			return "names descriptors that were not passed";
		break;
	case OP_CGROUP:
		if ((op->a != 1 && op->a != 2) || op->b == 0 || op->b > descriptors)
			return "not a cgroup that was passed";
		break;
	case OP_IMAGE:
		if (op->a == 0 || op->b == 0 || op->b > descriptors)
			return "not a file system that was passed";
		break;
	case OP_HOSTNAME:
		if (strlen(op->s[0]) > 64)
			return "too long";
		break;
	case OP_GRANT:
		if ((op->b & ~(uint64_t)GRANT_GATE) > descriptors)
			return "names a descriptor that was not passed";
		break;
	case OP_PORT:
		if (op->a == 0 || op->a & ~(uint64_t)(NET_BIND | NET_CONNECT))
			return "not rights of a port";
		if (op->b == 0 || op->b > UINT16_MAX)
			return "not a port";
		break;
	case OP_OBSERVE:
		if (op->a != OBSERVE_REFUSALS && op->a != OBSERVE_EVERYTHING)
			return "not a way to observe";
		if (descriptors == 0)
			return "names a descriptor that was not passed";
		/* fall through */
	case OP_SECCOMP:
		if (op->b == 0 || op->b % 8 || op->b / 8 > 4096)
			return "not a filter program";
		break;
	}
	return NULL;
}

static const char *decode_record(const unsigned char *at, size_t left, struct op *op, size_t *used)
{
	struct plan_record record;
	if (left < sizeof record)
		return "cut short";
	memcpy(&record, at, sizeof record);
	if (record.type == 0 || record.type >= OP_END)
		return "unknown operation";
	if (record.size < sizeof record || record.size % 8 || record.size > left)
		return "wrong size";
	const struct shape *shape = &shapes[record.type];
	*op = (struct op){.type = record.type, .a = record.a, .b = record.b};
	const unsigned char *data = at + sizeof record, *end = at + record.size;
	for (unsigned i = 0; i < shape->strings; i++) {
		const unsigned char *nul = memchr(data, 0, (size_t)(end - data));
		if (nul == NULL)
			return "unterminated string";
		op->s[i] = (const char *)data;
		data = nul + 1;
	}
	if (shape->flags & BLOB) {
		if (op->b > (uint64_t)(end - data))
			return "blob longer than its record";
		op->blob = data;
		data += op->b;
	}
	if (shape->flags & ROWS) {
		unsigned users = count_rows(op, 0), groups = count_rows(op, 1);
		if (users > MOST_ID_ROWS || groups > MOST_ID_ROWS)
			return "too many rows of ids";
		if ((users + groups) * sizeof(struct id_row) > (size_t)(end - data))
			return "rows longer than their record";
		op->blob = data;
		data += (users + groups) * sizeof(struct id_row);
	}
	if (end - data >= 8)
		return "trailing bytes";
	*used = record.size;
	return NULL;
}

/* Whether it needs nothing that only a launch brings, or is done at the launch all the same. */
static int comes_ahead(const struct op *op)
{
	return (shapes[op->type].flags & AHEAD) && !(op->type == OP_GRANT && (uint32_t)op->b);
}

int plan_waits(const struct op *op)
{
	return op->type == OP_CGROUP || op->type == OP_RLIMIT;
}

unsigned plan_common_prefix(const struct plan *one, const struct plan *other, size_t *size)
{
	struct plan_record record;
	unsigned count = one->base + 1;
	*size = one->base_size;
	if (other->base_size != *size || memcmp(one->base_bytes, other->base_bytes, *size))
		return count;
	for (; count < one->ahead && count < other->ahead; count++, *size += record.size) {
		memcpy(&record, one->base_bytes + *size, sizeof record);
		if (record.size > other->ahead_size - *size ||
		    memcmp(one->base_bytes + *size, other->base_bytes + *size, record.size))
			break;
	}
	return count;
}

/* Of operations whose first one has been decoded. */
int plan_is_plain(const struct op *ops)
{
	return ops[0].type == OP_NAMESPACES && ops[0].a == 0;
}

int plan_is_helped(const struct op *ops)
{
	return ops[0].type == OP_NAMESPACES && (ops[0].b & MADE_BY_HELPER) != 0;
}

/* What an operation cannot be where a helper executes it. */
static const char *check_helped(const struct op *ops, const struct op *op)
{
	const struct shape *shape = &shapes[op->type];
	if (!plan_is_helped(ops))
		return shape->helped & ONLY_HELPED ? "only for a helper" : NULL;
	if (!(shape->helped & HELPED))
		return "no helper does this";
	int plain = op->type != OP_OVERLAY && op->type != OP_VIEW && op->type != OP_ROOT;
	if ((!plain && (op->a || op->b & SOURCE_ALONE)) || (op->type == OP_SCRATCH && op->b) ||
	    (op->type == OP_BIND && !(op->a & 0x4 /* MOUNT_ATTR_NODEV */)) ||
	    (op->type == OP_PRIVILEGES && op->a) ||
	    (op->type == OP_NAMESPACES && (op->b != MADE_BY_HELPER || op->a == 0)))
		return "no helper does this so";
	return NULL;
}

uint64_t plan_keeps(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->count; i++)
		if (plan->ops[i].type == OP_PRIVILEGES)
			return plan->ops[i].a;
	return 0;
}

static int maps_zero(const struct op *namespaces, int groups)
{
	struct id_row rows[MOST_ID_ROWS];
	unsigned count = plan_id_rows(namespaces, groups, rows);
	for (unsigned i = 0; i < count; i++)
		if (rows[i].inside == 0)
			return 1;
	return 0;
}

/* Capabilities are root's, over the ids that are mapped: never over every id. */
static const char *check_root(const struct op *ops, const struct op *op)
{
	if (op->type != OP_PRIVILEGES || op->a == 0)
		return NULL;
	if (ops[0].type == OP_NAMESPACES && maps_zero(ops, 0) && maps_zero(ops, 1))
		return NULL;
	return "no root inside that could keep them";
}

int plan_decode(const void *bytes, size_t size, unsigned descriptors, struct plan *plan,
		struct plan_error *error)
{
	struct plan_header header;
	*error = (struct plan_error){0, "not a plan"};
	*plan = (struct plan){0};
	if (size < sizeof header || size > PLAN_MAX_SIZE)
		return -1;
	memcpy(&header, bytes, sizeof header);
	if (memcmp(header.magic, PLAN_MAGIC, sizeof header.magic) || header.size != size ||
	    header.count == 0 || header.count > PLAN_MAX_OPS || header.base >= header.count)
		return -1;
	struct op *ops = calloc(header.count, sizeof *ops);
	if (ops == NULL) {
		error->reason = "out of memory";
		return -1;
	}
	const unsigned char *at = (const unsigned char *)bytes + sizeof header;
	size_t left = size - sizeof header;
	unsigned rank = 0, seen[OP_END] = {0};
	for (unsigned i = 0; i < header.count; i++) {
		size_t used = 0;
		error->index = i;
		error->reason = decode_record(at, left, &ops[i], &used);
		if (error->reason == NULL) {
			const struct shape *shape = &shapes[ops[i].type];
			int base = i > 0 && i <= header.base;
			if (base && (!(shape->flags & BASE) || (ops[i].type == OP_BIND && ops[i].b)))
				error->reason = "does not belong in the base";
			else if (!base && shape->rank < rank)
				error->reason = "out of order";
			else if ((shape->flags & ONCE) && seen[ops[i].type])
				error->reason = "given twice";
			else if (plan_is_plain(ops) && !(shape->flags & PLAIN))
				error->reason = "needs namespaces";
			else if ((error->reason = check_helped(ops, &ops[i])) == NULL &&
				 (error->reason = check(&ops[i], descriptors)) == NULL)
				error->reason = check_root(ops, &ops[i]);
			rank = base ? 0 : shape->rank;
			seen[ops[i].type] = 1;
		}
		if (error->reason) {
			free(ops);
			return -1;
		}
		at += used;
		left -= used;
		if (i == 0)
			plan->base_bytes = at;
		if (i == header.base) {
			plan->base_size = plan->ahead_size = (size_t)(at - plan->base_bytes);
			plan->ahead = i + 1;
		}
		if (i == plan->ahead && i > header.base && comes_ahead(&ops[i])) {
			plan->ahead_size = (size_t)(at - plan->base_bytes);
			plan->ahead = i + 1;
		}
	}
	error->index = header.count;
	if (left)
		error->reason = "bytes after the last record";
	for (unsigned type = 1; type < OP_END; type++)
		if ((shapes[type].flags & NEEDED) && !seen[type] && !(plan_is_plain(ops) && !(shapes[type].flags & PLAIN)))
			error->reason = "an operation that every plan needs is missing";
	if (seen[OP_OBSERVE] && ops[0].b & JOINS_NETWORK)
		error->reason = "two operations need the last descriptor";
	if (plan_is_helped(ops) && (!seen[OP_HELPER] || !seen[OP_DEVICES] || header.base))
		error->reason = "a helper needs its arguments, and makes no base";
	if (error->reason) {
		free(ops);
		return -1;
	}
	plan->count = header.count;
	plan->base = header.base;
	plan->ops = ops;
	return 0;
}

void plan_free(struct plan *plan)
{
	free(plan->ops);
	plan->ops = NULL;
}
