/* The gate: every natively sandboxed process passes through it.
 *
 * Who runs where:
 *   resident  one per supervising process, outside every sandbox, in a mount namespace of its own
 *             (and for an ordinary user a user namespace), holding its control socket, a network
 *             namespace made ahead and the base: the read-only part of the root that sandboxes
 *             of one profile share. It clones the first process of each sandbox into fresh
 *             namespaces and writes its id maps.
 *   inside    that first process: PID 1 of the sandbox, with the caller's ids and, once its plan
 *             is executed, no capability. It raises the walls on itself, waits for "go", and then
 *             starts programs on request; they inherit the walls.
 * Both end when the supervisor ends: they watch a pidfd of it beside their socket, because a
 * forked child of the supervisor may keep the socket open, and PDEATHSIG means a thread.
 */
#ifndef STOCKADE_GATE_H
#define STOCKADE_GATE_H

#include "plan.h"

#include <stdint.h>

enum { MAX_DESCRIPTORS = 250, GRACE_TASKS = 2 };

/* The descriptors that a launch hands over, in this order; the plan's own follow. */
enum { LAUNCH_SOCKET, LAUNCH_PLAN, LAUNCH_SUPERVISOR, LAUNCH_FIRST };

/* From the gate to the supervisor. The numbers are shared with client.py. */
enum reply_kind {
	REPLY_FAILED = 1,  /* nothing was run: op, error, text */
	REPLY_BORN,        /* from the resident; status: pid; descriptors: a pidfd, then the namespaces */
	REPLY_MOUNTED,     /* the mounts are as they will stay */
	REPLY_READY,       /* the walls are up */
	REPLY_EXEC_FAILED, /* id, error, text: what could not be entered or executed */
	REPLY_EXITED,      /* id, status, and what the run used */
};

struct reply {
	uint32_t kind, id, op;
	int32_t error;
	uint32_t status, index;
	uint64_t user_us, system_us, peak_kib, switches;
	char text[256];
};

/* From the supervisor to the gate. */
enum request_kind {
	REQUEST_EXEC = 1, /* descriptors: body, stdin, stdout, stderr; flags: REQUEST_LAST */
	REQUEST_SIGNAL,   /* value: the signal; flags: REQUEST_ALL */
};
enum { REQUEST_LAST = 1, REQUEST_ALL = 2 };

struct request {
	uint32_t kind, id, flags, value;
};

/* The body of an exec request: counts, then cwd, the arguments and the environment,
 * each ended by a NUL. */
struct exec_body {
	uint32_t size, argc, envc;
};

/* One sandbox, as its first process sees it. */
struct box {
	int socket, supervisor;
	int word; /* from the resident: a byte when the ids are mapped, another when we have been looked at */
	const int *descriptors;
	unsigned descriptor_count;
	struct plan plan;
	int root;    /* the new root, by descriptor */
	int base;    /* the shared part of it that the resident made */
	int canary;  /* an unnamed file that Landlock must refuse */
	int ruleset; /* Landlock, until it is enforced */
	unsigned rules, scratches;
	long keyring;
	unsigned mask; /* the caller's umask, for the programs */
	uint64_t root_device;
};

int resident_main(int argc, char **argv);

_Noreturn void inside_main(struct box *box);

/* Each returns 0, or -1 with errno set and *culprit naming the operand where that is not op->s[0]. */
int mount_base(struct box *box);
int mount_base_drop(void);
int mount_seal(const struct box *box);
int mount_root(struct box *box, const struct op *op);
int mount_op(struct box *box, const struct op *op, const char **culprit);
int mount_pivot(struct box *box);
int wall_privileges(void);
int wall_keyring(void);
int wall_landlock_begin(struct box *box, const struct op *op);
int wall_landlock_grant(struct box *box, const struct op *op);
int wall_landlock_enforce(struct box *box);
int wall_seccomp(const struct op *op);
long session_keyring(void);

/* Looks again at what was done, through other calls than those that did it. */
int confirm_op(const struct box *box, const struct op *op, const char **culprit);
int confirm_walls(const struct box *box, const char **culprit);
int confirm_seccomp(void);

int read_whole(int fd, size_t limit, unsigned char **bytes, size_t *size);
int send_reply(int socket, const struct reply *reply, const int *descriptors, unsigned count);
int receive(int socket, void *data, size_t size, int *descriptors, unsigned *count);

/* In the test build only, one operation is dropped and reported as done. */
int sabotaged_op(unsigned index);
uint64_t sabotaged_flags(uint64_t clone_flags);
int sabotaged_maps(void);

#endif
