/* What an observer writes down: each different access once, with a count, in memory that the supervisor reads. */
#define _GNU_SOURCE
#include "observer.h"

enum { SLOTS = 1 << 17 };

static uint32_t slots[SLOTS]; /* places of records, by hash; 0: free */
static unsigned taken;
static int some_were_early; /* something could not be made because its directory was missing */
char texts[2][LONGEST];

static uint64_t hash(uint64_t sum, const void *bytes, size_t size)
{
	for (const unsigned char *at = bytes; size; at++, size--)
		sum = (sum ^ *at) * 0x100000001b3u;
	return sum;
}

static struct observation *record_at(uint32_t place)
{
	return (struct observation *)((char *)observer.memory + place);
}

static int is_same(uint32_t place, const struct observation *record, const char *target, const char *other)
{
	const struct observation *known = record_at(place);
	const char *text = (const char *)(known + 1);
	return known->action == record->action && known->error == record->error && known->program == record->program &&
	       known->call == record->call && known->target == record->target && known->other == record->other &&
	       memcmp(text, target, record->target) == 0 && memcmp(text + record->target, other, record->other) == 0;
}

/* The slot of a record, which is made complete; a free slot if there is no such record yet. */
static size_t slot_of(struct observation *record, const char *target, const char *other)
{
	size_t first = strlen(target), second = strlen(other);
	record->target = (uint16_t)first;
	record->other = (uint16_t)second;
	record->size = (uint32_t)((sizeof *record + first + second + 7) & ~(size_t)7);
	record->count = 1;
	uint64_t sum = hash(0xcbf29ce484222325u, record, sizeof *record);
	sum = hash(hash(sum, target, first), other, second);
	size_t slot = (sum ^ sum >> 32) % SLOTS;
	while (slots[slot] && !is_same(slots[slot], record, target, other))
		slot = (slot + 1) % SLOTS;
	return slot;
}

/* The place of a record, which is counted if it is there already; 0 if there is no room. */
uint32_t note(struct observation record, const char *target, const char *other)
{
	struct observations *memory = observer.memory;
	size_t slot = slot_of(&record, target, other);
	if (slots[slot]) {
		__atomic_add_fetch(&record_at(slots[slot])->count, 1, __ATOMIC_RELAXED);
		return slots[slot];
	}
	uint64_t used = memory->used;
	if (taken >= SLOTS / 4 * 3 || used + record.size > OBSERVATIONS_SIZE - sizeof *memory) {
		__atomic_add_fetch(&memory->missed, 1, __ATOMIC_RELAXED);
		return 0;
	}
	uint32_t place = (uint32_t)(sizeof *memory + used);
	struct observation *fresh = record_at(place);
	*fresh = record;
	memcpy(fresh + 1, target, record.target);
	memcpy((char *)(fresh + 1) + record.target, other, record.other);
	slots[slot] = place;
	taken++;
	__atomic_store_n(&memory->used, used + record.size, __ATOMIC_RELEASE);
	return place;
}

/* The name of something of a process in /proc. */
const char *proc_name(pid_t pid, const char *what, int number)
{
	static char name[64];
	if (number < 0)
		snprintf(name, sizeof name, "%d/%s", pid, what);
	else
		snprintf(name, sizeof name, "%d/%s/%d", pid, what, number);
	return name;
}

const char *own_name(int fd)
{
	static char name[16];
	snprintf(name, sizeof name, "%d", fd);
	return name;
}

/* The executable of the last process that was asked for, until any process executes another. */
static struct {
	pid_t pid;
	uint32_t program;
} executing;

void forget_program(void)
{
	executing.pid = 0;
}

/* The executable of a process, as a record of its own. */
uint32_t program_of(pid_t pid)
{
	static char path[PATH_MAX];
	if (pid == executing.pid)
		return executing.program;
	ssize_t length = readlinkat(observer.proc, proc_name(pid, "exe", -1), path, sizeof path - 1);
	if (length <= 0)
		return 0;
	path[length] = '\0';
	executing.pid = pid;
	executing.program = note((struct observation){.action = OBSERVED_PROGRAM}, path, "");
	return executing.program;
}

/* The absolute path of a place. */
const char *text_of(const struct place *place, char text[LONGEST])
{
	ssize_t length = 0;
	if (place->path[0] != '/' && place->dir >= 0) {
		length = readlinkat(observer.own, own_name(place->dir), text, PATH_MAX - 1);
		if (length < 0 || text[0] != '/')
			length = 0;
		if (length == 1)
			length = 0; /* the root */
		text[length++] = '/';
	}
	snprintf(text + length, LONGEST - (size_t)length, "%s", place->path);
	return text;
}

/* Whether a program makes what it could not make before, because it has made the directory meanwhile. */
static int was_early(pid_t pid, enum observed_action action, const struct place *place)
{
	if (!some_were_early || action != OBSERVED_CREATE)
		return 0;
	struct observation record = {.action = action, .error = ENOENT, .program = program_of(pid)};
	return slots[slot_of(&record, text_of(place, texts[0]), "")] != 0;
}

void observe(pid_t pid, enum observed_action action, int error, const struct place *place,
		    const struct place *other)
{
	some_were_early |= action == OBSERVED_CREATE && error == ENOENT;
	if (error == 0 && !observer.everything && !was_early(pid, action, place))
		return;
	struct observation record = {.action = action, .error = error, .program = error ? program_of(pid) : 0};
	note(record, text_of(place, texts[0]), other ? text_of(other, texts[1]) : "");
}

void observe_text(pid_t pid, enum observed_action action, int error, const char *target)
{
	if (error || observer.everything)
		note((struct observation){.action = action, .error = error, .program = error ? program_of(pid) : 0}, target, "");
}
