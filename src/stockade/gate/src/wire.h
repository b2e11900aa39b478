/* What the gate and its supervisor say to each other: every number, flag and size that both must know.
 *
 * Python's copy is gate/wire.py, under the same names, and tests/kernel/gate/test_gate_wire.py compares the two. A number
 * that only one side uses has no place here.
 */
#ifndef STOCKADE_WIRE_H
#define STOCKADE_WIRE_H

#include <stdint.h>

/* Which sandboxes a resident is for: with a network of their own, with the host's, without namespaces, or made by
 * a helper. The user namespace of a mapped one has the subordinate ids of an ordinary user as well. */
#define KIND_OWN_NETWORK "own-network"
#define KIND_HOST_NETWORK "host-network"
#define KIND_PLAIN "plain"
#define KIND_HELPED "helped"
#define KIND_MAPPED_OWN_NETWORK "mapped-own-network"
#define KIND_MAPPED_HOST_NETWORK "mapped-host-network"

/* Only the supervisor, outside, can have subordinate ids mapped: what a mapped resident says when it has its user
 * namespace, and hears when the maps are written. */
#define WORD_UNSHARED "unshared"
#define WORD_MAPPED "mapped"

/* What a resident finds open: its control socket, a pidfd of the supervisor and, in a template, the text that the
 * interpreter executes. */
enum { OPEN_CONTROL = 3, OPEN_SUPERVISOR, OPEN_TEXT };

/* How many descriptors a launch can carry for its plan. */
enum { MAX_DESCRIPTORS = 250 };

/* What a supervisor asks of its resident; every message has this size. */
enum { RESIDENT_LAUNCH, RESIDENT_NETWORK };
enum { RESIDENT_REQUEST_SIZE = 144, MAX_PORTS = 66 };
struct resident_request {
	uint32_t kind;
	uint32_t count; /* of ports, for a network: those of TCP and then those of UDP, each sorted; 0 for a launch */
	uint16_t ports[MAX_PORTS];
	uint16_t datagrams; /* how many of them are of UDP; 0 for a launch */
	uint16_t flags;	    /* NETWORK_MORE or NETWORK_LOOPBACK; 0 for a launch */
};
_Static_assert(sizeof(struct resident_request) == RESIDENT_REQUEST_SIZE, "struct resident_request");

/* The descriptors that come with a request for a network: where to reply, and the sandbox's network namespace. */
enum { NETWORK_SOCKET, NETWORK_NAMESPACE, NETWORK_DESCRIPTORS };
/* The network has its routes already: only listeners on these ports are added. */
enum { NETWORK_MORE = 1 };
/* Nothing is routed: TCP listeners on these ports of 127.0.0.1, whatever network the sandbox has. */
enum { NETWORK_LOOPBACK = 2 };

/* The descriptors that a launch hands over, in this order; the plan's own follow. */
enum { LAUNCH_SOCKET, LAUNCH_PLAN, LAUNCH_SUPERVISOR, LAUNCH_FIRST };

/* What a gate that a helper has started finds open. From HELD_FIRST on is what the operations of its plan need; the
 * helper's arguments name these numbers, so that both sides count alike. */
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

/* How many of them an operation needs: an overlay the directory below and the one above, and what is bound one for
 * the helper, which closes it, and one for the gate, which looks whether it was bound. */
enum {
	HELD_BY_FILE = 1,
	HELD_BY_BIND = 2,
	HELD_BY_OVERLAY = 2,
	HELD_BY_VIEW = 1,
	HELD_BY_SECCOMP = 1,
	HELD_BY_CGROUP = 1,
};

/* From the gate to the supervisor. */
enum reply_kind {
	REPLY_FAILED = 1,  /* nothing was run: op, error, text */
	REPLY_BORN,        /* from the resident; status: pid; descriptors: a pidfd, then the namespaces */
	REPLY_MOUNTED,     /* the mounts are as they will stay; descriptors: the changes of each private overlay */
	REPLY_READY,       /* the walls are up; index: rules of Landlock; text: SHA-256 of the installed filter */
	REPLY_TERMINAL,    /* descriptor: the outer end of the program's terminal */
	REPLY_STARTED,     /* from the program's own process, right before it executes */
	REPLY_EXEC_FAILED, /* error, text: what could not be entered or executed */
	REPLY_EXITED,      /* status, ended, and what the run used */
	REPLY_ROOTS,       /* descriptors: the root, and the overlay if there is one */
	REPLY_STOPPED,     /* the program on a terminal was stopped; status: by which signal */
	REPLY_NETWORK,     /* from a child of the resident; status: families, 1 is IPv4 alone; index: ports; descriptors: the
			      namespace of the first listener, for each family TCP by port, UDP of each family, then a
			      NETLINK_SOCK_DIAG socket */
	REPLY_CONNECTED,   /* to a publisher; index: the request's number; error, or else descriptor: a TCP socket that is
			      connected or connecting */
};

/* Who ended a run, if it was not the program itself. */
enum end_reason {
	ENDED_ITSELF,
	ENDED_BY_TIME,
	ENDED_BY_REQUEST,
	ENDED_FROM_OUTSIDE,
	ENDED_BY_MEMORY, /* the sandbox met its limit of memory */
	ENDED_BY_CPU,    /* or of processor time */
};

enum { REPLY_SIZE = 320, REPLY_TEXT = 256 };
struct reply {
	uint32_t kind, op;
	int32_t error;
	uint32_t status, index, ended;
	uint64_t user_us, system_us, peak_kib, switches;
	uint64_t ended_us; /* of a run: when, by CLOCK_MONOTONIC; the supervisor may hear of it later */
	char text[REPLY_TEXT];
};
_Static_assert(sizeof(struct reply) == REPLY_SIZE, "struct reply");

/* From the supervisor to init, or on a run's own socket to its keeper; and from a publisher to init. */
enum request_kind {
	REQUEST_EXEC = 1, /* with its body; descriptors: stdin, stdout, stderr; and as the flags say */
	REQUEST_SIGNAL,   /* value: the signal; flags: to whom, and whose the terminal is first */
	REQUEST_END,      /* TERM to everything, KILL to what is left after grace_ms */
	REQUEST_WATCH,    /* descriptors as the flags say; value: cores; wall_us: processor time */
	REQUEST_ROOTS,    /* for looking at the files from outside */
	REQUEST_TIME,     /* to a keeper; wall_us: how long the run may still take, 0 for ever */
	REQUEST_SERVE,    /* descriptor: a socket on which init answers REQUEST_CONNECT, and nothing else */
	REQUEST_CONNECT,  /* from its other end; value: the port; flags: the family; grace_ms: a number for the reply */
};
enum {
	EXEC_KEPT = 1,     /* the sandbox outlives this run; one more descriptor: the run's own socket */
	EXEC_TELL = 2,     /* say REPLY_STARTED */
	EXEC_ENTER = 4,    /* one more descriptor: the file by which the program enters its cgroup */
	EXEC_TERMINAL = 8, /* no stdio but a new terminal of value >> 16 lines and value & 0xffff columns */
	EXEC_STDOUT = 16,  /* with a terminal: stdout is a descriptor all the same */
	EXEC_STDERR = 32,  /* and stderr */
	EXEC_BEHIND = 64,  /* with a terminal: in its background, so that the program stops when it wants to read */
	EXEC_LONG = 128,   /* the body is a file, the first descriptor, instead of following the request */
	EXEC_RESUME = 256, /* nothing is executed: it goes on in the template that init is a copy of */
	EXEC_FIRST = 512,  /* of a kept run: it is process 2, and init attends to it itself */
	EXEC_AWAITED = 1024, /* of a kept run: somebody waits for its end; it has no keeper if nothing else is inside */
};
/* So many more descriptors follow stdio, the program's 3, 4 and so on: flags >> EXEC_MORE_AT. */
enum { EXEC_MORE_AT = 16, EXEC_MORE_MOST = 64 };
enum { CONNECT_ANY, CONNECT_IPV4, CONNECT_IPV6 };
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

enum { REQUEST_SIZE = 24 };
struct request {
	uint32_t kind, flags, value, grace_ms;
	uint64_t wall_us; /* of an exec: how long it may take, 0 for ever */
};
_Static_assert(sizeof(struct request) == REQUEST_SIZE, "struct request");

/* What the kernel calls struct termios, which has another size in the C library. */
enum { SETTINGS_SIZE = 36 };

/* The body of an exec request: counts, then cwd, the arguments and the environment, each ended by a NUL. */
enum { EXEC_BODY_SIZE = 60, EXEC_MAX_SIZE = 8 << 20, EXEC_SHORT = 4096 /* the most that follows a request */ };
#define NO_ID 0xffffffffu
struct exec_body {
	uint32_t size, argc, envc;
	uint32_t uid, gid; /* whom the program runs as, without further groups; both NO_ID: as init does */
	uint32_t settled; /* whether a terminal gets these settings, or those of any new one */
	unsigned char settings[SETTINGS_SIZE];
};
_Static_assert(sizeof(struct exec_body) == EXEC_BODY_SIZE, "struct exec_body");

/* How many pseudo-terminals a sandbox can have, as an option of its devpts. The kernel has 3,072 for all mounts but the
 * host's own (kernel.pty.max without kernel.pty.reserve). */
#define MOST_TERMINALS "64"

/* What the library says of a process that has confined itself. */
enum { CONFINED_SIZE = 212, SHA256_TEXT = 65, CONFINED_TEXT = 128 };
struct confinement {
	uint32_t begun; /* whether something was done that cannot be undone */
	uint32_t op, rules;
	int32_t error;
	char filter[SHA256_TEXT], text[CONFINED_TEXT];
};
_Static_assert(sizeof(struct confinement) == CONFINED_SIZE, "struct confinement");

/* A plan: a header, and then records. */
#define PLAN_MAGIC "STKPLAN2"
enum { PLAN_MAX_SIZE = 16 << 20, PLAN_MAX_OPS = 16384 };
enum { PLAN_HEADER_SIZE = 24, PLAN_RECORD_SIZE = 24 };

struct plan_header {
	char magic[8];
	uint32_t size;
	uint32_t count;
	uint32_t base;
	uint32_t unused;
};
_Static_assert(sizeof(struct plan_header) == PLAN_HEADER_SIZE, "struct plan_header");

struct plan_record {
	uint32_t type;
	uint32_t size;
	uint64_t a, b;
};
_Static_assert(sizeof(struct plan_record) == PLAN_RECORD_SIZE, "struct plan_record");

enum op_type {
	OP_NAMESPACES = 1, /* a: clone flags, b: MAPS_EVERY_ID, or else the caller's own, MADE_BY_HELPER, JOINS_NETWORK, FEW_MEMBERSHIPS;
			      a = 0: none at all, a plain plan; with rows of ids these are mapped instead: of users
			      b >> USER_ROWS_AT & 0xff, then of groups b >> GROUP_ROWS_AT & 0xff */
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
	OP_PRIVILEGES, /* a: the capabilities that are kept, of KEEPABLE */
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
	OP_PORT,       /* a: network rights, b: the TCP port that they are granted for */
	OP_OBSERVE,    /* blob: the filter that says what is refused; a: OBSERVE_REFUSALS or OBSERVE_EVERYTHING, b: length;
			  the last descriptor of the launch is the memory for struct observations */
	OP_PLACE,      /* path; a: the number in STAGING of the mount that a helper made for it */
	OP_END
};

enum { OBSERVE_REFUSALS = 1, OBSERVE_EVERYTHING = 2 /* and what succeeds */ };

/* What an observer shares with the supervisor: this, and then a record for each different access. The observer only
 * appends and counts, and never waits for the supervisor. */
#define OBSERVATIONS_MAGIC "STKOBSV1"
enum { OBSERVATIONS_SIZE = 16 << 20, OBSERVATIONS_HEADER_SIZE = 32, OBSERVATION_SIZE = 32 };
struct observations {
	char magic[8];
	uint64_t used;   /* bytes of records */
	uint64_t missed; /* accesses for which there was no room */
	uint64_t unread; /* calls of programs whose memory could not be read */
};
_Static_assert(sizeof(struct observations) == OBSERVATIONS_HEADER_SIZE, "struct observations");

enum observed_action {
	OBSERVED_PROGRAM, /* no access: an executable, to which other records refer */
	OBSERVED_READ,
	OBSERVED_WRITE,
	OBSERVED_CREATE,
	OBSERVED_REMOVE,
	OBSERVED_RENAME, /* or link: from the target to the other */
	OBSERVED_EXECUTE,
	OBSERVED_CONNECT,
	OBSERVED_BIND,
	OBSERVED_CALL, /* one that the filter refuses */
};
struct observation {
	uint32_t size; /* with the two texts, which follow without a NUL, and up to the next multiple of 8 */
	uint16_t action, unused;
	int32_t error;
	uint32_t program; /* the place of its record, counted from the start of the memory, or 0 */
	uint64_t count;
	uint32_t call; /* its number */
	uint16_t target, other; /* lengths */
};
_Static_assert(sizeof(struct observation) == OBSERVATION_SIZE, "struct observation");

/* Where a helper mounts, in private memory over the pseudo-terminals, what the usher then moves to its place. */
#define STAGING "/dev/pts"

#define MAPS_EVERY_ID 1u
/* A helper executes the plan as far as the pivot, and loads the filter; the gate confirms what it did. */
#define MADE_BY_HELPER 2u
/* The last descriptor of the launch is a network namespace: that of a sandbox of the same resident. */
#define JOINS_NETWORK 4u
/* Programs may join multicast groups: a socket no more than MOST_MEMBERSHIPS of IPv4. */
#define FEW_MEMBERSHIPS 8u
enum { MOST_MEMBERSHIPS = 4 };

/* One row of an id map, as the kernel has them. */
enum { ID_ROW_SIZE = 12, MOST_ID_ROWS = 8, USER_ROWS_AT = 32, GROUP_ROWS_AT = 40 };
struct id_row {
	uint32_t inside, outside, count;
};
_Static_assert(sizeof(struct id_row) == ID_ROW_SIZE, "struct id_row");

/* What root of a user namespace may keep: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID and SETUID, by their
 * numbers. They are about files and processes whose ids are mapped; none of them mounts, makes devices or loads
 * anything. */
#define KEEPABLE 0xfbu

/* For init alone: programs are put behind one wall more, without this grant. */
#define GRANT_GATE 0x100000000u

/* The changes go to the private file system, and are bounded with it. */
#define OVERLAY_PRIVATE 0x80000000u
/* With the descriptor of a view or an overlay: it is a mount of its own, without what is mounted in it. */
#define SOURCE_ALONE 0x80000000u

#endif
