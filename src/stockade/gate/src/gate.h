/* The gate: every sandboxed process passes through it. Its processes, from the supervisor inwards:
 *
 *	supervisor ─► resident ─► init ─► program                      a run that the sandbox ends with
 *	supervisor ─► resident ─► init ─► keeper ─► program            a run in a living sandbox
 *	supervisor ─► resident ─► warden ─► init ─► (keeper ─►) program    without namespaces
 *	supervisor ─► resident ─► usher ─► bubblewrap ─► init ─► (keeper ─►) program    by a helper
 *	supervisor ─► template ─► init ─► (keeper ─►) program          warm Python
 *	supervisor ─► resident ─► (a child in the sandbox's network)   rules for the network
 *
 * The resident (resident.c) is started once by each supervisor and each kind of sandbox, with an empty
 * environment, as the caller. It lives outside every sandbox: in a mount namespace of its own, for an ordinary
 * user also in a user namespace (a mapped resident's has the user's subordinate ids as well, which the supervisor has
 * mapped for it), and in a network namespace that it gives away with the next sandbox. A launch may also ask for the
 * network of a living sandbox, which the resident then enters for that one birth. (The
 * resident for sandboxes without namespaces unshares nothing, the one for a helper nothing but root's mounts.) It
 * holds /dev/null as 0, 1 and 2, its control socket as 3 and a pidfd of the supervisor as 4. For each launch, a
 * message on the control socket, it clones the first process of a sandbox into fresh namespaces, writes that
 * process's id maps, sends the supervisor a pidfd and the namespaces of it, and hands it the launch. Between
 * launches it keeps the base, the read-only part of the root that sandboxes of one profile share.
 *
 * A spare is a first process that the resident cloned before its launch, when it had nothing else to do. The spare
 * has executed what the last two plans began with alike, holds nothing of a user's, and serves one launch or none.
 *
 * Init (init.c) is that first process once it has its launch: PID 1 in user, mount, pid, ipc, uts, network and
 * cgroup namespaces of its own (the network is the host's if the policy shares it), with the caller's ids. It
 * raises the walls of the plan on itself, in walls.c, mounts.c and masks.c, looks at them again, in confirm.c,
 * and has no capability left when it says that it is ready. (Where the plan maps ids of its own, the caller is root
 * inside, and init, keepers and programs keep the capabilities that the plan names; a program may then run as another
 * of these ids, without any.) It holds a socket to the supervisor, a pidfd of the
 * supervisor and a signalfd, and beside them only what it guards: the memory, the processor time and the mount
 * table of the sandbox (guard.c). On request it starts programs, which inherit the walls. It may also hold the socket
 * of a publisher, a process outside that can ask it for connections to the sandbox's own ports (publish.c).
 *
 * A keeper (attend.c) is a child of init that attends to one program of a living sandbox, as the same user in the
 * same namespaces. It adopts what the program's processes leave behind, keeps the program's time, and holds a
 * socket of its own to the supervisor, the supervisor's pidfd and the signalfd. A sandbox that ends with its
 * only run needs no keeper: init attends to the program itself, as it does to the one that is to be process 2.
 *
 * The observer (observer.c) exists only in an observed sandbox: a thread of init that the filter notifies of calls, with
 * descriptors, a directory, a umask and a filter of its own. It shares memory with the supervisor, which it writes.
 *
 * The warden (warden.c) exists only without namespaces: it stands between the resident and init, as the caller, in
 * the host's namespaces and in a Landlock domain that keeps signals inside. It holds a pidfd of the supervisor,
 * a signalfd and a pipe to init.
 *
 * The usher (usher.c) exists only where bubblewrap raises the walls: it stands between the resident and
 * bubblewrap, as the caller, for root in a mount namespace of its own. It opens the sources, starts bubblewrap
 * with them, and then holds a pidfd of bubblewrap and one of the supervisor. Bubblewrap executes the gate as
 * init, which finds what it needs at fixed numbers and looks at what bubblewrap has made.
 *
 * A template (template.c) is a resident in an interpreter, the gate as a library. Each first process is then a copy
 * of the template that runs nothing but the gate, and a program may go on as the interpreter in one more copy.
 *
 * For a sandbox with rules for the network, the resident makes one more child right after the sandbox is born
 * (network.c): outside every sandbox, as the caller, in the sandbox's network namespace and in the user namespace that
 * this belongs to. It routes every address to listeners that it opens, hands them to the supervisor, and ends.
 *
 * Besides, the gate tries out what this machine can do (probe.c), in children that end with it; and the library
 * raises the walls of a plan without namespaces on the process that loads it (confine.c).
 *
 * Who ends when whom:
 *   - The supervisor ends: the resident, init, keepers, warden and usher see that on their pidfd of it. A socket would
 *     not tell, since a forked child of the supervisor may keep it open, and PDEATHSIG is about a thread.
 *     The resident ends at once. Programs get TERM and GRACE_MS; then init ends.
 *   - Init ends: the kernel kills all of its pid namespace. Without namespaces the warden does that.
 *   - The only run of a sandbox ends: init kills and reaps everything else inside, reports, and ends.
 *   - A run of a living sandbox ends: its keeper reports and ends, or init reports, and what the run left is init's.
 *   - A keeper is killed or stopped: init kills everything inside, because nobody could end that run any more.
 *   - The warden ends: init kills everything below it. Bubblewrap or the usher ends: the kernel kills init.
 *   - The observer fails: init ends with it, being the same process. No program can signal it.
 *   - The resident or the template ends: its spare ends with it; living sandboxes go on.
 */
#ifndef STOCKADE_GATE_H
#define STOCKADE_GATE_H

#include "fd.h"
#include "plan.h"
#include "wire.h"

#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_RUNS = 256 };

/* The signal by which init hears that a keeper has ended. */
enum { KEEPER_ENDED = SIGUSR1 };

/* How long programs may take to end when the supervisor has ended. */
enum { GRACE_MS = 2000 };

/* Tasks that the gate may have beyond those of the programs: a keeper and a newborn for each run. */
enum { GRACE_TASKS = 2 * MAX_RUNS + 2 };

/* How often a limit of the whole sandbox was met, and which. */
struct breaches {
	volatile uint32_t count;
	volatile enum end_reason kind;
};

/* What a launch brings: to the first process of a sandbox, or to an usher. */
struct launch {
	int socket;             /* to the supervisor */
	int supervisor;         /* a pidfd of it */
	const int *descriptors; /* that the plan names */
	unsigned descriptor_count;
	struct plan plan;
	unsigned char *plan_bytes; /* which it points into */
	size_t plan_size;
};

/* A root that is being built: that of a sandbox, or the base that many share. */
enum { MAX_OVERLAYS = 16 /* whose changes are private */ };
struct tree {
	int root;               /* by descriptor */
	int base;               /* of a sandbox's: the shared part of it that the resident made */
	int image;              /* the file system that takes what programs write instead of the private tmpfs, or -1 */
	int uppers[MAX_OVERLAYS]; /* what each private overlay changed, until they have been handed out */
	unsigned overlays;      /* how many there are */
	int canary;             /* an unnamed file that Landlock must refuse */
	const int *descriptors; /* by which the supervisor judged the sources */
	unsigned scratches;
	uint64_t root_device, image_device;
};
#define NO_TREE {.root = -1, .base = -1, .image = -1, .canary = -1}

/* What a process knows of the walls that it raises on itself: init, or one that loaded the library. */
struct walls {
	int ruleset;     /* Landlock, until it is enforced */
	int inner;       /* where programs are put behind one wall more: its rules, or -1 */
	int outsider;    /* a socket by an abstract name that Landlock must refuse, or -1 */
	unsigned rules;  /* that Landlock was given */
	char filter[SHA256_TEXT]; /* the SHA-256 of what was installed */
	long keyring;    /* that of the session before */
	int bounded;     /* `wall_bounds` was done ahead */
	pid_t warden;    /* without namespaces a process that is outside the walls, or else 0 */
	int itself;      /* the process has loaded the library, and is no init */
	int helped;      /* a helper made the namespaces and mounts, and has loaded the filter */
};
#define NO_WALLS {.ruleset = -1, .inner = -1, .outsider = -1}

/* What init knows of the runs in its sandbox. A keeper begins with a copy of it. */
struct runs {
	struct launch *launch;
	struct resident *resident; /* that init is a copy of, or NULL */
	int to_resident; /* brings a word when the ids are mapped, then the launch; closed with the first start, then -1 */
	int from_warden; /* a byte to end, and its end; or -1 */
	int plain;       /* there is a warden, and there are no namespaces */
	int inner;       /* the rules of the wall that only programs are put behind, or -1 */
	unsigned mask;   /* the caller's umask, for the programs */
	int started;     /* whether a program was: then the first number is taken */
	int beside;      /* init attends to a run beside everything else */
	pid_t keepers[MAX_RUNS]; /* of the runs that go on */
	unsigned kept;
	struct breaches *breaches;
};

/* What init holds. */
struct init {
	struct launch launch;
	struct tree tree;
	struct walls walls;
	struct runs runs;
	unsigned ahead;      /* operations before this one have been executed, but for those that wait */
	const char *problem; /* what kept the warden or a helper from its work, for the supervisor to be told */
	int problem_error;
};

struct resident;
int resident_main(int argc, char **argv);
/* Enters the namespaces that a resident of that kind lives in. */
int resident_unshare(const char *kind);
/* Wipes what it remembers of plans, in a copy that is to know nothing of them. */
void resident_forget(struct resident *resident);

/* What the first process of a sandbox is born with, and a plan cannot change afterwards. Compared as bytes. */
struct birth {
	uint64_t flags, how, keep;
	uint64_t tasks; /* with rows: how many, or 0 for any number */
	struct id_row rows[2][MOST_ID_ROWS]; /* of users and of groups */
	uint64_t counts[2];
};

struct rlimit;
void birth_read(const struct plan *plan, struct birth *birth);
/* Writes the id maps of a process that has just been cloned, or of the resident itself. */
int birth_map(pid_t pid, const struct birth *birth, uid_t uid, gid_t gid);
/* In a mapped resident: until the supervisor has had its own ids mapped. */
int birth_await_maps(void);
/* Limits the tasks of all ids together in the namespace that is cloned next; *before is what the limit was. */
int birth_limit(const struct birth *birth, struct rlimit *before);

struct stat;
/* What is wrong with a request for a network, or NULL. */
const char *network_problem(const struct resident_request *request, unsigned descriptors);
/* Answers it from a child of its own; `host` is the network namespace that no sandbox has. */
void network_start(const struct resident_request *request, const int *descriptors, const struct stat *host);

/* What an interpreter finds when it goes on in a program of its own: so many arguments, and then the
 * environment, each ended by a NUL. */
struct continuation {
	const char *strings;
	size_t size, argc;
};

/* Starts the interpreter: KIND, its variables, its path and its arguments. */
int template_start(char **argv);
int in_template(void);
void template_set_dumpable(int dumpable);
/* Called by the interpreter: 0 if its own file cannot be changed through /proc/self/exe. */
int template_sealed(const char *kind);
/* Called by the interpreter once; returns in programs only. `before` and `after` are what it does around any fork
 * of its own, in the template once and in each program. */
void template_main(const char *kind, const char *order, void (*before)(void), void (*after)(void),
		   struct continuation *found);

_Noreturn void init_main(struct init *init);
/* Until the sandbox ends; `children` is a signalfd for SIGCHLD, KEEPER_ENDED and SIGTERM. */
void serve_supervisor(struct runs *runs, int children);

_Noreturn void usher_main(const struct launch *launch, int plan, unsigned mask, const char *sabotage);
_Noreturn void helped_main(int argc, char **argv);
/* The number under which a helper, or the gate that it starts, finds what an operation needs. */
int held_number(const struct plan *plan, unsigned index);
/* Closes them, once nothing is mounted any more. */
void held_close(const struct plan *plan);
/* By a child of the usher: enters the mount namespace that a helper made, with the rights of its owner, and there
 * executes what the helper has left. -1 with the index of the operation that failed. */
int helper_tree_enter(int mounts);
int helper_tree_finish(const struct plan *plan, unsigned *index);
int namespace_of(pid_t pid, int pidfd, unsigned index);

_Noreturn void warden_main(struct init *init, pid_t resident, int supervisor);
/* From here on signals reach only what is started below; `known` is a process of the same user that is not. */
int scope_signals(pid_t known);
/* 0 if that process, which is outside, cannot be signalled. */
int confirm_signal_scope(pid_t known);

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
	int *more; /* the program's descriptors from 3 on, and how many */
	unsigned extra;
	uint32_t uid, gid; /* whom it runs as, or NO_ID */
};

/* Takes over its body, which is `program->bytes`. */
int program_decode(struct program *program);
void program_free(struct program *program);
int program_terminal(struct program *program);
pid_t program_start(struct runs *runs, const struct program *program);
/* In its own process; the first `descriptors` are its own. Returns only if it cannot go on. */
void template_resume(struct runs *runs, const struct program *program, unsigned descriptors);

/* Starts the program and stays until it has ended; with `all` everything in the sandbox is its. */
_Noreturn void attend(struct runs *runs, struct program *program, int children, int all);
/* The same beside whatever else init does: it takes over the program's socket, and is asked on every round what to
 * wait for and for how long, and told whether that came. */
void beside_begin(struct runs *runs, struct program *program);
int beside_socket(struct runs *runs);
int beside_timeout(const struct runs *runs);
void beside_handle(const struct runs *runs, short events);

struct pollfd;
enum { GUARD_POLLS = 2 };
int guard_open(struct runs *runs);
/* Before a keeper is forked: it is to hear of breaches. */
int guard_share(struct runs *runs);
/* In a program's own process: unmaps what init shares with its keepers. */
int guard_unmap(struct runs *runs);
int guard_watch(const struct request *request, int *descriptors, unsigned count);
void guard_polls(struct pollfd *polls);
int guard_timeout(int otherwise);
int guard_spent(void);
/* What is over, if anything; a mount that came off ends the sandbox here. */
enum end_reason guard_check(const struct runs *runs, const struct pollfd *polls);

/* Takes over the socket of a publisher, in place of the last one: publish.c. */
void publish_open(const struct plan *plan, int socket);
void publish_close(void);
struct pollfd publish_poll(void);
void publish_handle(short events);

/* Counts how often programs tried to reach a network that is not there. */
uint32_t count_unreached(const struct plan *plan);

uint64_t now_ms(void);
enum exemption { NOBODY, KEEPERS, THEIR_RUNS };
/* A signal to every descendant of a process but its keepers, or but those and all that is below them. */
void signal_descendants(const struct runs *runs, int number, enum exemption spared);
/* Whether a process outside the sandbox sent SIGTERM. */
int asked_to_end(int signals);
int set_limit(const struct op *op, uint64_t reserve);
/* Whether the warden asks the sandbox to end; does not return if the warden has died. */
int warden_asks_end(int from_warden, short events);

/* Each returns 0, or -1 with errno set and *culprit naming the operand where that is not op->s[0]. */
int open_source(const int *descriptors, const char *path, uint64_t same);
int mount_base(struct tree *tree);
int mount_base_drop(void);
int mount_seal(const struct tree *tree);
int mount_root(struct tree *tree, const struct op *op);
int mount_image(struct tree *tree, const struct op *op);
int mount_op(struct tree *tree, const struct op *op, const char **culprit);
/* The directory on the private tmpfs that holds the masks of a number, and one more mask in it: masks.c. */
int unseen_directory(const struct tree *tree, const char *name);
int mask_layer(const struct tree *tree, uint64_t number);
int mask_name(const struct tree *tree, const struct op *op);
int mount_pivot(struct tree *tree);
/* What root inside keeps of its capabilities; without any it is root no more. */
int wall_privileges(const struct walls *walls, uint64_t keep);
/* The part of it that nothing before it needs. */
int wall_bounds(uint64_t keep);
unsigned long securebits(uint64_t keep);
int wall_keyring(void);
int wall_landlock_begin(struct walls *walls, const struct plan *plan, const struct op *op);
int wall_landlock_grant(struct walls *walls, const int *descriptors, const struct op *op);
int wall_landlock_port(struct walls *walls, const struct op *op);
int wall_landlock_enforce(const struct walls *walls);
/* For a program's own process, where it is put behind one wall more. */
int wall_inner(int rules);
int wall_seccomp(struct walls *walls, const struct op *op);
long session_keyring(void);

/* The observer of a sandbox whose plan has one, observer.c: maps what it writes to, while the launch's descriptors are
 * open; starts it behind every wall but the filter; and hands it what the filter that is loaded with these flags
 * notifies. */
int observer_map(const struct launch *launch);
int observer_start(const struct op *op);
int observer_flags(void);
int observer_listen(int listener);

/* Each confirms something through other calls than those that did it: 0, or -1 with errno set. */
int confirm_tree(const struct tree *tree, const struct op *op, const char **culprit);
int confirm_op(const struct walls *walls, const struct op *op, const char **culprit);
int confirm_walls(const struct walls *walls, const struct plan *plan, int canary, const char **culprit);
int confirm_inner(const struct walls *walls);
/* Whether what a helper shows through an overlay is what it was told to show. */
int confirm_shown(const char *path, int lower, int upper);
/* Whether the file that it has bound there is this one. */
int confirm_bound(const char *path, int source);
int confirm_seccomp(void);

void sha256_text(const void *data, size_t size, char text[SHA256_TEXT]);

void wipe(void *bytes, size_t size);
int read_whole(int fd, size_t limit, unsigned char **bytes, size_t *size);
int send_message(int socket, const void *bytes, size_t size, const int *descriptors, unsigned count);
int send_reply(int socket, const struct reply *reply, const int *descriptors, unsigned count);
int receive(int socket, void *data, size_t size, int *descriptors, unsigned *count);
int receive_more(int socket, void *data, size_t size, size_t *more, int *descriptors, unsigned *count);

/* In the test build only, one operation is dropped and reported as done. */
int sabotaged_op(unsigned index);
uint64_t sabotaged_flags(uint64_t clone_flags);
int sabotaged_maps(void);
int sabotaged_join(void);
uint64_t sabotaged_scopes(uint64_t scopes);
void *sabotaged_filter(void *program, size_t size);
int sabotaged_seccomp(void);
enum network_sabotage {
	LEAVE_CONFIRMATION = 1, /* the gate's own second look */
	LEAVE_ROUTE4 = 2,
	LEAVE_ROUTE6 = 4,
	LEAVE_ADDRESS4 = 8,
	LEAVE_ADDRESS6 = 16,
	OTHER_PORT = 32,
	SET_REUSEPORT = 64,
	SET_REUSEADDR = 128,
	LEAVE_LISTEN = 256,
	LEAVE_NAMESPACE = 512,
};
int sabotaged_network(enum network_sabotage step);

#endif
