/* Drives plan_decode with mutated plans: decoder SECONDS SEED PLAN...
 *
 * Deterministic for a seed, apart from where the clock stops it. Every input lies in memory of exactly
 * its own size, and of what is accepted every string and blob is read to its end, so that the address
 * sanitizer sees the first byte too far.
 */
#define _GNU_SOURCE
#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_SEEDS = 64, ROOM = 1 << 17, MAX_RECORDS = 1024 };

static struct {
	unsigned char *bytes;
	size_t size;
} seeds[MAX_SEEDS];
static unsigned seed_count;
static uint64_t state;
static volatile unsigned touched;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static size_t below(size_t limit)
{
	return limit ? (size_t)(next() % limit) : 0;
}

static void load(const char *path)
{
	FILE *file = fopen(path, "rb");
	unsigned char *bytes = malloc(ROOM);
	if (file == NULL || bytes == NULL || seed_count == MAX_SEEDS)
		exit(2);
	seeds[seed_count].size = fread(bytes, 1, ROOM, file);
	seeds[seed_count++].bytes = bytes;
	fclose(file);
}

/* Where the records of a plan begin, as far as its sizes can be followed. */
static unsigned records(const unsigned char *bytes, size_t size, size_t *starts)
{
	unsigned count = 0;
	size_t at = sizeof(struct plan_header);
	while (count < MAX_RECORDS && at + sizeof(struct plan_record) <= size) {
		struct plan_record record;
		memcpy(&record, bytes + at, sizeof record);
		starts[count++] = at;
		if (record.size < sizeof record || record.size > size - at)
			break;
		at += record.size;
	}
	return count;
}

static const uint64_t INTERESTING[] = {0, 1, 2, 7, 8, 9, 23, 24, 31, 32, 255, 4096, 0x7fffffff, 0x80000000,
				       0xffffffff, 0x100000000, 0x7fffffffffffffff, 0xfffffffffffffff8,
				       0xffffffffffffffff};

static uint64_t number(void)
{
	return next() % 3 ? INTERESTING[below(sizeof INTERESTING / sizeof *INTERESTING)] : next() >> below(64);
}

static size_t mutate(unsigned char *bytes, size_t size)
{
	static size_t starts[MAX_RECORDS];
	unsigned count = records(bytes, size, starts);
	size_t record = count ? starts[below(count)] : 0;
	struct plan_record head;
	if (count)
		memcpy(&head, bytes + record, sizeof head);
	switch (below(10)) {
	case 0: /* a bit */
		if (size)
			bytes[below(size)] ^= (unsigned char)(1 << below(8));
		break;
	case 1: /* a byte */
		if (size)
			bytes[below(size)] = (unsigned char)next();
		break;
	case 2: /* cut short */
		size = below(size + 1);
		break;
	case 3: /* the type, size or a number of a record */
		if (count) {
			uint64_t value = number();
			size_t field = below(4);
			if (field < 2)
				memcpy(bytes + record + field * 4, &value, 4);
			else
				memcpy(bytes + record + 8 + (field - 2) * 8, &value, 8);
		}
		break;
	case 4: /* a field of the header */
		if (size >= sizeof(struct plan_header)) {
			uint32_t value = (uint32_t)number();
			memcpy(bytes + 8 + below(4) * 4, &value, 4);
		}
		break;
	case 5: /* a size off by a little */
		if (count) {
			head.size += (uint32_t)(below(5) * 8) - 16;
			memcpy(bytes + record, &head, sizeof head);
		}
		break;
	case 6: /* a record removed */
		if (count && head.size <= size - record) {
			memmove(bytes + record, bytes + record + head.size, size - record - head.size);
			size -= head.size;
		}
		break;
	case 7: { /* a piece of another plan in between, or in place */
		unsigned other = (unsigned)below(seed_count);
		static size_t theirs[MAX_RECORDS];
		unsigned many = records(seeds[other].bytes, seeds[other].size, theirs);
		if (!count || !many)
			break;
		size_t from = theirs[below(many)];
		struct plan_record piece;
		memcpy(&piece, seeds[other].bytes + from, sizeof piece);
		if (piece.size > seeds[other].size - from || size + piece.size > ROOM)
			break;
		memmove(bytes + record + piece.size, bytes + record, size - record);
		memcpy(bytes + record, seeds[other].bytes + from, piece.size);
		size += piece.size;
		break;
	}
	case 8: /* no NUL where one was */
		if (count && head.size > sizeof head && head.size <= size - record)
			for (size_t i = record + sizeof head; i < record + head.size; i++)
				if (bytes[i] == 0)
					bytes[i] = 'x';
		break;
	case 9: /* a path's character */
		if (count && head.size > sizeof head && head.size <= size - record)
			bytes[record + sizeof head + below(head.size - sizeof head)] = "/.\0a"[below(4)];
		break;
	}
	return size;
}

/* Mostly the header is made to fit, so that what comes after it is looked at. */
static void repair(unsigned char *bytes, size_t size)
{
	static size_t starts[MAX_RECORDS];
	if (size < sizeof(struct plan_header) || below(8) == 0)
		return;
	uint32_t total = (uint32_t)size, count = records(bytes, size, starts);
	memcpy(bytes + 8, &total, 4);
	if (below(4))
		memcpy(bytes + 12, &count, 4);
}

/* Of what is accepted no id is mapped twice, and none is the one that means none. */
static void touch_rows(const struct op *namespaces, int groups)
{
	struct id_row rows[MOST_ID_ROWS];
	unsigned count = plan_id_rows(namespaces, groups, rows);
	for (unsigned i = 0; i < count; i++) {
		uint64_t end = (uint64_t)rows[i].inside + rows[i].count, out = (uint64_t)rows[i].outside + rows[i].count;
		if (rows[i].count == 0 || end > NO_ID || out > NO_ID)
			abort();
		for (unsigned j = 0; j < count; j++)
			if (i != j && ((rows[j].inside >= rows[i].inside && rows[j].inside < end) ||
				       (rows[j].outside >= rows[i].outside && rows[j].outside < out)))
				abort();
	}
}

static void touch(const struct plan *plan)
{
	unsigned sum = 0;
	if (plan->ahead_size < plan->base_size || plan->ahead <= plan->base || plan->ahead > plan->count)
		abort();
	for (size_t i = 0; i < plan->ahead_size; i++)
		sum += plan->base_bytes[i];
	for (unsigned i = 0; i < plan->count; i++) {
		const struct op *op = &plan->ops[i];
		sum += (unsigned)strlen(op_name(op->type));
		for (unsigned s = 0; s < PLAN_MAX_STRINGS; s++)
			if (op->s[s])
				sum += (unsigned)strlen(op->s[s]);
		if (op->blob && op->type != OP_NAMESPACES)
			for (uint64_t b = 0; b < op->b; b++)
				sum += op->blob[b];
	}
	touch_rows(&plan->ops[0], 0);
	touch_rows(&plan->ops[0], 1);
	if (plan_keeps(plan) & ~(uint64_t)KEEPABLE)
		abort();
	touched += sum;
}

static int try(const unsigned char *bytes, size_t size)
{
	unsigned char *exact = malloc(size ? size : 1);
	struct plan plan;
	struct plan_error error;
	if (exact == NULL)
		exit(2);
	memcpy(exact, bytes, size);
	int refused = plan_decode(exact, size, (unsigned)below(12), &plan, &error);
	if (refused)
		touched += (unsigned)strlen(error.reason); /* a refusal always has one */
	else
		touch(&plan);
	if (!refused)
		plan_free(&plan);
	free(exact);
	return !refused;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	double seconds = strtod(argv[1], NULL);
	state = strtoull(argv[2], NULL, 0) * 0x9e3779b97f4a7c15u | 1;
	for (int i = 3; i < argc; i++)
		load(argv[i]);
	static unsigned char work[ROOM * 2];
	unsigned long tries = 0, accepted = 0;
	struct timespec began, now;
	clock_gettime(CLOCK_MONOTONIC, &began);
	do {
		for (unsigned turn = 0; turn < 1000; turn++, tries++) {
			unsigned seed = (unsigned)below(seed_count);
			size_t size = seeds[seed].size;
			memcpy(work, seeds[seed].bytes, size);
			for (size_t times = below(5); times > 0; times--)
				size = mutate(work, size);
			repair(work, size);
			accepted += (unsigned long)try(work, size);
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((double)(now.tv_sec - began.tv_sec) + 1e-9 * (double)(now.tv_nsec - began.tv_nsec) < seconds);
	printf("%lu %lu\n", tries, accepted);
	return 0;
}
