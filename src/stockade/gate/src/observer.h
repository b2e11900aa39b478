/* What the files of the observer share; observer.c says what it is. Everything here is used by its one thread alone. */
#ifndef STOCKADE_OBSERVER_H
#define STOCKADE_OBSERVER_H

#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

struct sock_filter;

enum { LONGEST = 2 * PATH_MAX };

/* Of open and its relatives. */
enum { KNOWN_FLAGS = O_ACCMODE | O_APPEND | O_ASYNC | O_CLOEXEC | O_CREAT | O_DIRECT | O_DIRECTORY | O_DSYNC | O_EXCL |
		     O_LARGEFILE | O_NOATIME | O_NOCTTY | O_NOFOLLOW | O_NONBLOCK | O_PATH | O_SYNC | O_TMPFILE | O_TRUNC |
		     0100000 /* O_LARGEFILE on 64 bits */ };

/* A path that a program gave, and where it begins. */
struct place {
	int dir;      /* of a relative path, or AT_FDCWD */
	char *path;   /* as the program wrote it */
	int borrowed; /* `dir` is kept of the caller */
};
#define owned_place __attribute__((cleanup(close_place))) struct place

struct observer {
	const struct sock_filter *filter; /* the ordinary one, which says what is refused */
	size_t filter_length;
	int everything; /* whether what succeeds is written down as well */
	int performs;   /* whether the observer opens, makes and removes for programs */
	int listener, proc, own; /* `own`: the directory of this thread's descriptors in /proc */
	pid_t init;
	dev_t only_proc; /* the device of /proc, if no other process file system can be seen */
	struct observations *memory;
};
extern struct observer observer;
extern char paths[2][PATH_MAX], texts[2][LONGEST];

struct change {
	enum observed_action action;
	enum { MAKE_DIRECTORY, MAKE_LINK, MAKE_SYMLINK, REMOVE, RENAME } kind;
	int dirs[2];
	uint64_t addresses[2]; /* of a symbolic link: its text first */
	uint64_t mode, flags;
};

/* observer.c: answers to a call. */
void answer(const struct seccomp_notif *call, int error, uint32_t flags);
void go_on(const struct seccomp_notif *call);
void count_unread(const struct seccomp_notif *call);
void hand_over(const struct seccomp_notif *call, int fd, int close_on_exec);

/* observed_records.c: what is written down. */
/* Written down, or counted if it is known already: the place of the record, or 0 if there is no room. */
uint32_t note(struct observation record, const char *target, const char *other);
/* What a process tried, if it is to be written down: it failed, or everything is. */
void observe(pid_t pid, enum observed_action action, int error, const struct place *place, const struct place *other);
void observe_text(pid_t pid, enum observed_action action, int error, const char *target);
/* The executable of a process, as the place of a record. */
uint32_t program_of(pid_t pid);
void forget_program(void);
/* The absolute path of a place. */
const char *text_of(const struct place *place, char text[LONGEST]);
/* Names below /proc, and below the directory of the observer's own descriptors. */
const char *proc_name(pid_t pid, const char *what, int number);
const char *own_name(int number);

/* observed_caller.c: what only the caller's side tells. */
int still_waits(const struct seccomp_notif *call);
ssize_t read_memory(pid_t pid, uint64_t from, void *into, size_t size);
int read_path(pid_t pid, uint64_t from, char path[PATH_MAX]);
int find(const struct seccomp_notif *call, int dirfd, uint64_t address, int always, struct place *place);
void open_directory(pid_t pid, int dirfd, int always, struct place *place);
void close_place(struct place *place);
int take_umask(pid_t pid);
/* What the caller does to what is known of it: it makes a call, changes its directory or umask, or executes. */
void caller_calls(pid_t pid);
void caller_changes(pid_t pid);
void caller_executes(pid_t pid);

/* observed_files.c: opening. */
int look_up(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
int is_in_proc(int fd);
int may_differ(const struct place *place, int *links);
int predict_change(const struct place *place);
void open_file(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags, uint64_t mode,
	       uint64_t resolve);
void open_by_structure(const struct seccomp_notif *call);

/* observed_names.c: names in directories, and what only the program can do. */
void change_names(const struct seccomp_notif *call, const struct change *change);
void observe_execution(const struct seccomp_notif *call, int dirfd, uint64_t address, uint64_t flags);
void observe_entry(const struct seccomp_notif *call);
void observe_address(const struct seccomp_notif *call, int binds);

#endif
