/* The gate: every natively sandboxed process passes through it.
 *
 * Who runs where:
 *   resident  one per supervising process, outside every sandbox, in a mount namespace of its own
 *             (and for an ordinary user a user namespace), holding its control socket, a network
 *             namespace made ahead and the base: the read-only part of the root that sandboxes
 *             of one profile share. It clones the first process of each sandbox into fresh
 *             namespaces, writes its id maps and hands it the launch.
 *   spare     such a first process that was born before its launch, when the resident had nothing
 *             to do, and has made what the last plans began with. It serves one launch or none.
 *   inside    that first process: PID 1 of the sandbox, with the caller's ids and, once its plan
 *             is executed, no capability. It raises the walls on itself, waits for "go", and then
 *             starts programs on request; they inherit the walls.
 *   template  a resident in an interpreter, whose programs can go on in a copy of it: see template.c.
 *   warden    in a sandbox without namespaces only, between the two: see warden.c.
 *   usher     in a sandbox that a helper makes, between the resident and the helper: see usher.c.
 * Both end when the supervisor ends: they watch a pidfd of it beside their socket, because a
 * forked child of the supervisor may keep the socket open, and PDEATHSIG means a thread.
 */
#ifndef STOCKADE_GATE_H
#define STOCKADE_GATE_H

#include "plan.h"

#include <stdint.h>
#include <sys/types.h>

enum { MAX_DESCRIPTORS = 250, MAX_RUNS = 256 };

/* What programs are given to end when the supervisor has. */
enum { GRACE_MS = 2000 };

/* Tasks that the gate may have beyond those of the programs: a keeper and a newborn for each run. */
enum { GRACE_TASKS = 2 * MAX_RUNS + 2 };

/* The descriptors that a launch hands over, in this order; the plan's own follow. */
enum { LAUNCH_SOCKET, LAUNCH_PLAN, LAUNCH_SUPERVISOR, LAUNCH_FIRST };

/* What a gate that a helper has started finds open. From HELD_FIRST on is what `held_number` counts: the numbers
 * are in the helper's arguments, and shared with plan.py. */
enum {
	HELD_SOCKET = 3,
	HELD_PLAN,
	HELD_SUPERVISOR,
	HELD_GATE,
	HELD_WORD,
	HELD_ARGUMENTS,
	HELD_STATUS,
	HELD_FIRST,
};

/* From the gate to the supervisor. The numbers are shared with client.py. */
enum reply_kind {
	REPLY_FAILED = 1,  /* nothing was run: op, error, text */
	REPLY_BORN,        /* from the resident; status: pid; descriptors: a pidfd, then the namespaces */
	REPLY_MOUNTED,     /* the mounts are as they will stay; descriptor: the changes of a private overlay */
	REPLY_READY,       /* the walls are up; index: rules of Landlock; text: SHA-256 of the installed filter */
	REPLY_TERMINAL,    /* descriptor: the outer end of the program's terminal */
	REPLY_STARTED,     /* from the program's own process, right before it executes */
	REPLY_EXEC_FAILED, /* error, text: what could not be entered or executed */
	REPLY_EXITED,      /* status, ended, and what the run used */
	REPLY_ROOTS,       /* descriptors: the root, and the overlay if there is one */
	REPLY_STOPPED,     /* the program on a terminal was stopped; status: by which signal */
};

/* Who ended a run, if it was not the program itself. */
enum ended {
	ENDED_ITSELF,
	ENDED_BY_TIME,
	ENDED_BY_REQUEST,
	ENDED_FROM_OUTSIDE,
	ENDED_BY_MEMORY, /* the sandbox met its limit of memory */
	ENDED_BY_CPU,    /* or of processor time */
};

struct reply {
	uint32_t kind, op;
	int32_t error;
	uint32_t status, index, ended;
	uint64_t user_us, system_us, peak_kib, switches;
	uint64_t ended_us; /* of a run: when, by CLOCK_MONOTONIC; the supervisor may hear of it later */
	char text[256];
};

/* From the supervisor to the gate, or on a run's own socket to its keeper. */
enum request_kind {
	REQUEST_EXEC = 1, /* descriptors: body; stdin, stdout, stderr; and as the flags say */
	REQUEST_SIGNAL,   /* value: the signal; flags: to whom, and whose the terminal is first */
	REQUEST_END,      /* TERM to everything, KILL to what is left after grace_ms */
	REQUEST_WATCH,    /* descriptors as the flags say; value: cores; wall_us: processor time */
	REQUEST_ROOTS,    /* for looking at the files from outside */
	REQUEST_TIME,     /* to a keeper; wall_us: how long the run may still take, 0 for ever */
};
enum {
	EXEC_KEPT = 1,     /* the sandbox outlives this run; one more descriptor: a socket for its keeper */
	EXEC_TELL = 2,     /* say REPLY_STARTED */
	EXEC_ENTER = 4,    /* one more descriptor: the file by which the program enters its cgroup */
	EXEC_TERMINAL = 8, /* no stdio but a new terminal of value >> 16 lines and value & 0xffff columns */
	EXEC_STDOUT = 16,  /* with a terminal: stdout is a descriptor all the same */
	EXEC_STDERR = 32,  /* and stderr */
	EXEC_BEHIND = 64,  /* with a terminal: in its background, so that the program stops when it wants to read */
	EXEC_MORE = 128,   /* two more descriptors after stdio: the program's 3 and 4 */
	EXEC_RESUME = 256, /* nothing is executed: it goes on in the template that we are a copy of */
	EXEC_FIRST = 512,  /* of a kept run: it is process 2, and PID 1 attends to it itself */
};
enum {
	WATCH_MEMORY = 1,  /* an eventfd of cgroup v1 */
	WATCH_COUNTED = 2, /* or the memory.events of v2 */
	WATCH_CPU = 4,     /* the file that counts processor time */
};
enum {
	SIGNAL_ALL = 1,     /* not the program's process group, but every process of the run */
	SIGNAL_INFRONT = 2, /* the program gets the foreground of its terminal */
	SIGNAL_BEHIND = 4,  /* or its background */
};

struct request {
	uint32_t kind, flags, value, grace_ms;
	uint64_t wall_us; /* of an exec: how long it may take, 0 for ever */
};

/* What the kernel calls struct termios, which has another size in the C library. */
enum { SETTINGS_SIZE = 36 };

/* The body of an exec request: counts, then cwd, the arguments and the environment,
 * each ended by a NUL. */
struct exec_body {
	uint32_t size, argc, envc;
	uint32_t settled; /* whether a terminal gets these settings, or those of any new one */
	unsigned char settings[SETTINGS_SIZE];
};

/* How often a limit of the whole sandbox was met, and which. */
struct breaches {
	volatile uint32_t count;
	volatile enum ended kind;
};

/* One sandbox, as its first process sees it. */
struct box {
	int socket, supervisor;
	int word; /* to the resident: brings a word when the ids are mapped, then the launch */
	const int *descriptors;
	unsigned descriptor_count;
	struct plan plan;
	unsigned char *plan_bytes; /* which it points into */
	size_t plan_size;
	unsigned ahead; /* operations before this one have been executed, but for those that wait */
	int root;    /* the new root, by descriptor */
	int upper;   /* what a private overlay changed, until it has been handed out, or -1 */
	int bounded; /* `wall_bounds` was done ahead */
	int image;   /* the file system that takes what programs write instead of the private tmpfs, or -1 */
	int base;    /* the shared part of it that the resident made */
	int canary;  /* an unnamed file that Landlock must refuse */
	int outsider; /* a socket by an abstract name that Landlock must refuse, or -1 */
	int ruleset; /* Landlock, until it is enforced */
	int inner;   /* where programs are put behind one wall more: its rules, or -1 */
	unsigned rules, scratches;
	char filter[65]; /* the SHA-256 of what was installed */
	int started; /* whether a program was: then the first number is taken */
	int first;   /* PID 1 attends to a run */
	pid_t keepers[MAX_RUNS]; /* of the runs that go on */
	unsigned kept;
	struct breaches *breaches;
	long keyring;
	const char *problem; /* what kept the warden or a helper from its work, for the supervisor to be told */
	int problem_error;
	pid_t warden; /* in a sandbox without namespaces, or 0; of a living process: one that is outside its walls */
	int itself;   /* a living process raises its own walls */
	int helped;   /* namespaces and mounts were made by a helper, which has loaded the filter */
	int told;     /* from it: a byte to end, and its end; or -1 */
	unsigned mask; /* the caller's umask, for the programs */
	uint64_t root_device, image_device;
};

int resident_main(int argc, char **argv);
/* What a resident gate of that kind does before anything else. */
int resident_own(const char *kind);
/* What it remembers of plans, in a copy that is to know nothing of them. */
void resident_forget(void);

/* What an interpreter finds when it goes on in a program of its own: so many arguments, and then the
 * environment, each ended by a NUL. */
struct continuation {
	const char *strings;
	size_t size, argc;
};

/* Starts the interpreter: KIND, its variables, its path and its arguments. */
int template_start(char **argv);
int in_template(void);
void template_dumpable(int dumpable);
/* Called by the interpreter: 0 if its own file cannot be changed through /proc/self/exe. */
int template_sealed(const char *kind);
/* Called by the interpreter once; returns in programs only. `before` and `after` are what it does around any fork
 * of its own, in the template once and in each program. */
void template_main(const char *kind, const char *order, void (*before)(void), void (*after)(void),
		   struct continuation *found);

_Noreturn void inside_main(struct box *box);

_Noreturn void usher_main(struct box *box, int plan, const char *sabotage);
_Noreturn void helped_main(int argc, char **argv);
/* The number under which a helper, or the gate that it starts, finds what an operation needs. */
int held_number(const struct plan *plan, unsigned index);
/* Lets go of them, once nothing is mounted any more. */
void held_close(const struct plan *plan);
int namespace_of(pid_t pid, int pidfd, unsigned index);

_Noreturn void warden_main(struct box *box, pid_t resident, int supervisor);
/* From here on signals reach only what is started below; `known` is a process of ours that is not. */
int keep_signals_in(pid_t known);
/* 0 if a process of ours outside cannot be signalled. */
int signals_stay_in(pid_t known);

/* A program that is to be started, and where. */
struct program {
	unsigned char *bytes;
	size_t size;
	const char *cwd;
	char **argv, **envp;
	const unsigned char *settings; /* of its terminal, or NULL */
	struct request request;
	int socket; /* of the run */
	int entrance; /* of its cgroup, or -1 */
	int stdio[3];
	int more[2]; /* the program's descriptors 3 and 4, or -1 */
};

int program_read(int body, struct program *program);
void program_free(struct program *program);
int program_terminal(struct program *program);
pid_t program_start(struct box *box, const struct program *program);
/* In its own process; the first `descriptors` are its own. Returns only if it cannot go on. */
void template_resume(struct box *box, const struct program *program, unsigned descriptors);

/* Starts the program and stays until it has ended; with `all` everything in the sandbox is its. */
_Noreturn void attend(struct box *box, struct program *program, int children, int all);
/* The same beside whatever else PID 1 does: it takes over the program's socket, and is asked on every round what to
 * wait for and for how long, and told whether that came. */
void first_begin(struct box *box, struct program *program);
int first_socket(struct box *box);
int first_patience(const struct box *box);
void first_hear(const struct box *box, short events);

struct pollfd;
enum { GUARD_POLLS = 2 };
int guard_open(struct box *box);
/* Before a keeper is forked: it is to hear of breaches. */
int guard_share(struct box *box);
/* In a program's own process: what the gate shares with its keepers is none of its. */
int guard_let_go(struct box *box);
int guard_watch(const struct request *request, int *descriptors, unsigned count);
void guard_polls(struct pollfd *polls);
int guard_patience(int otherwise);
int guard_spent(void);
/* What is over, if anything; a mount that came off ends the sandbox here. */
enum ended guard_check(const struct box *box, const struct pollfd *polls);

/* How often programs tried to reach a network that is not there. */
uint32_t unreached(const struct box *box);

uint64_t now_ms(void);
enum spared { NOBODY, KEEPERS, THEIR_RUNS };
/* A signal to every descendant of a process but its keepers, or but those and all that is below them. */
void signal_descendants(const struct box *box, int number, enum spared spared);
/* Whether somebody outside the sandbox sent SIGTERM. */
int told_to_end(int signals);
int set_limit(const struct op *op, uint64_t reserve);
/* What the warden says; it does not return if that has died. */
int told_by_warden(const struct box *box, short events);

/* Each returns 0, or -1 with errno set and *culprit naming the operand where that is not op->s[0]. */
int open_source(const struct box *box, const char *path, uint64_t same);
int mount_base(struct box *box);
int mount_base_drop(void);
int mount_seal(const struct box *box);
int mount_root(struct box *box, const struct op *op);
int mount_image(struct box *box, const struct op *op);
int mount_op(struct box *box, const struct op *op, const char **culprit);
int mount_pivot(struct box *box);
int wall_privileges(const struct box *box);
/* The part of it that nothing before it needs. */
int wall_bounds(void);
int wall_keyring(void);
int wall_landlock_begin(struct box *box, const struct op *op);
int wall_landlock_grant(struct box *box, const struct op *op);
int wall_landlock_enforce(struct box *box);
/* For a program's own process, where it is put behind one wall more. */
int wall_inner(int rules);
int wall_seccomp(struct box *box, const struct op *op);
long session_keyring(void);

/* Looks again at what was done, through other calls than those that did it. */
int confirm_op(const struct box *box, const struct op *op, const char **culprit);
int confirm_walls(const struct box *box, const char **culprit);
int confirm_inner(const struct box *box);
/* Whether what a helper shows through an overlay is what it was told to show. */
int confirm_shown(const char *path, int lower, int upper);
/* Whether the file that it has bound there is this one. */
int confirm_bound(const char *path, int source);
int confirm_seccomp(void);

enum { SHA256_TEXT = 65 };
void sha256_text(const void *data, size_t size, char text[SHA256_TEXT]);

void wipe(void *bytes, size_t size);
int read_whole(int fd, size_t limit, unsigned char **bytes, size_t *size);
int send_message(int socket, const void *bytes, size_t size, const int *descriptors, unsigned count);
int send_reply(int socket, const struct reply *reply, const int *descriptors, unsigned count);
int receive(int socket, void *data, size_t size, int *descriptors, unsigned *count);

/* In the test build only, one operation is dropped and reported as done. */
int sabotaged_op(unsigned index);
uint64_t sabotaged_flags(uint64_t clone_flags);
int sabotaged_maps(void);
uint64_t sabotaged_scopes(uint64_t scopes);
void *sabotaged_filter(void *program, size_t size);

#endif
