/* The root that the sandbox sees, built from nothing in a private tmpfs.
 *
 * A source is opened once, without following any symlink, and is mounted from that descriptor;
 * where the supervisor looked at it before, it must still be the very same file. Mount points are
 * made only on the private tmpfs or in the image, never on a file system of the host.
 */
#define _GNU_SOURCE
#include "gate.h"
#include "kernel.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>

enum { NOT_THE_SAME_FILE = ESTALE };

static int set_attributes(int mount, uint64_t attributes)
{
	/* Private: the host's later mounts must not appear inside. */
	struct mount_attr attr = {.attr_set = attributes, .propagation = MS_PRIVATE};
	return sys_mount_setattr(mount, "", AT_EMPTY_PATH | AT_RECURSIVE, &attr);
}

struct option {
	const char *key, *value; /* without a value: a flag */
};

static int new_mount(const char *type, const struct option *options, unsigned count,
		     unsigned attributes)
{
	int context = sys_fsopen(type);
	if (context < 0)
		return -1;
	int mount = -1, failed = 0;
	for (unsigned i = 0; i < count && !failed; i++)
		failed = sys_fsconfig(context,
				      options[i].value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG,
				      options[i].key, options[i].value);
	if (!failed && sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL) == 0)
		mount = sys_fsmount(context, attributes);
	int error = errno;
	close(context);
	errno = error;
	return mount;
}

/* Where the resident keeps the base: a directory that every system has and no policy may grant.
 * (Not "/": a process whose root is covered counts as chrooted and may not make user namespaces.) */
#define BASE_PLACE "/sys"

/* A tmpfs, attached: submounts need a root that is attached somewhere. */
static int new_tree(struct box *box, uint64_t size, uint64_t inodes, const char *place)
{
	char bytes[32], files[32];
	snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)size);
	snprintf(files, sizeof files, "%llu", (unsigned long long)inodes);
	const struct option options[] = {{"mode", "0755"}, {"size", bytes}, {"nr_inodes", files}};
	box->root = new_mount("tmpfs", options, size ? 3 : 1, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	struct stat info;
	if (box->root < 0 || fstat(box->root, &info))
		return -1;
	box->root_device = info.st_dev;
	return sys_move_mount(box->root, "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH);
}

int mount_base(struct box *box)
{
	return new_tree(box, 0, 0, BASE_PLACE);
}

int mount_base_drop(void)
{
	return umount2(BASE_PLACE, MNT_DETACH);
}

int mount_seal(const struct box *box)
{
	struct mount_attr sealed = {.attr_set = MOUNT_ATTR_RDONLY};
	return sys_mount_setattr(box->root, "", AT_EMPTY_PATH, &sealed);
}

int mount_root(struct box *box, const struct op *op)
{
	/* Over "/" there is always a place, and it hides nothing from us: our root stays below. */
	box->base = open(BASE_PLACE, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (box->base < 0 || new_tree(box, op->a, op->b, "/"))
		return -1;
	static const char canary[] = "canary";
	if (mknodat(box->root, canary, S_IFREG | 0600, 0))
		return -1;
	box->canary = openat(box->root, canary, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	return box->canary < 0 || unlinkat(box->root, canary, 0) ? -1 : 0;
}

static int on_private(const struct box *box, int directory)
{
	struct stat info;
	if (directory == box->root)
		return 0;
	if (fstat(directory, &info))
		return -1;
	if (info.st_dev != box->root_device && (box->image < 0 || info.st_dev != box->image_device)) {
		errno = EROFS;
		return -1;
	}
	return 0;
}

/* Lets go of what `parent_of` gave. */
static void leave(const struct box *box, int parent)
{
	int error = errno;
	if (parent != box->root)
		close(parent);
	errno = error;
}

/* The directory that holds the last part of the path, made where it is missing. */
static int parent_of(const struct box *box, const char *path, char *last)
{
	int at = box->root;
	const char *part = path + 1;
	while (at >= 0) {
		size_t length = strcspn(part, "/");
		memcpy(last, part, length);
		last[length] = '\0';
		if (part[length] == '\0')
			return at;
		int next = openat(at, last, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (next < 0 && errno == ENOENT && on_private(box, at) == 0 &&
		    mkdirat(at, last, 0755) == 0)
			next = openat(at, last, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		leave(box, at);
		at = next;
		part += length + 1;
	}
	return -1;
}

/* A mount point of the right kind at the path, as a descriptor. */
static int mount_point(const struct box *box, const char *path, int directory)
{
	char last[256];
	int parent = parent_of(box, path, last);
	if (parent < 0)
		return -1;
	int point = openat(parent, last, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (point < 0 && errno == ENOENT && on_private(box, parent) == 0) {
		int made = directory ? mkdirat(parent, last, 0755)
				     : mknodat(parent, last, S_IFREG | 0444, 0);
		if (made == 0)
			point = openat(parent, last, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	}
	leave(box, parent);
	return point;
}

/* Attaches a detached mount at the path and closes both descriptors. */
static int attach(const struct box *box, int mount, const char *path, int directory)
{
	int result = -1, point = mount < 0 ? -1 : mount_point(box, path, directory);
	if (point >= 0)
		result = sys_move_mount(mount, "", point, "",
					MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	int error = errno;
	if (point >= 0)
		close(point);
	if (mount >= 0)
		close(mount);
	errno = error;
	return result;
}

/* Opens a path of the host in this mount namespace. `same` is the descriptor through which the
 * supervisor judged it, + 1: it belongs to another mount namespace and cannot be mounted itself,
 * but while it is open its inode number cannot be reused, so equal numbers mean the same file. */
int open_source(const struct box *box, const char *path, uint64_t same)
{
	int source = sys_openat2(AT_FDCWD, path, O_PATH, RESOLVE_NO_SYMLINKS);
	if (source < 0 && same && errno == ENOENT)
		errno = NOT_THE_SAME_FILE; /* it is in a file system that was mounted after we looked */
	if (source < 0 || same == 0)
		return source;
	struct stat now, then;
	if (fstat(source, &now) || fstat(box->descriptors[same - 1], &then) ||
	    now.st_dev != then.st_dev || now.st_ino != then.st_ino) {
		close(source);
		errno = NOT_THE_SAME_FILE;
		return -1;
	}
	return source;
}

static int bind(const struct box *box, const struct op *op)
{
	int source = open_source(box, op->s[1], op->b);
	if (source < 0)
		return -1;
	struct stat info;
	int tree = -1;
	if (fstat(source, &info) == 0)
		tree = sys_open_tree(source, "",
				     OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
	int error = errno;
	close(source);
	errno = error;
	if (tree < 0)
		return -1;
	if (set_attributes(tree, op->a)) {
		error = errno;
		close(tree);
		errno = error;
		return -1;
	}
	return attach(box, tree, op->s[0], S_ISDIR(info.st_mode));
}

/* A directory on the private tmpfs that nobody finds: it lies below /proc, over which the real one is
 * mounted last. */
static int hidden(const struct box *box, const char *name)
{
	char path[32];
	snprintf(path, sizeof path, "proc/%s", name);
	if (mkdirat(box->root, "proc", 0555) && errno != EEXIST)
		return -1;
	if (mkdirat(box->root, path, 0700) && errno != EEXIST)
		return -1;
	int directory = openat(box->root, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory >= 0 && on_private(box, directory)) {
		close(directory);
		errno = EROFS;
		return -1;
	}
	return directory;
}

/* Only what is attached can be cloned from, so it is, where nobody looks; `mount_pivot` lets go of it. */
int mount_image(struct box *box, const struct op *op)
{
	struct stat info;
	int mount = box->descriptors[op->b - 1], point = hidden(box, "image");
	if (point < 0)
		return -1;
	int failed = sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	int error = errno;
	close(point);
	errno = error;
	if (failed)
		return -1;
	box->image = openat(mount, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (box->image < 0 || fstat(box->image, &info))
		return -1;
	box->image_device = info.st_dev;
	return 0;
}

/* A directory for what programs write: in the image if there is one, else on the private tmpfs. */
static int written(const struct box *box, const char *name)
{
	if (box->image < 0)
		return hidden(box, name);
	/* It is there already where this is the second attempt; until now nobody but us has written there. */
	if (mkdirat(box->image, name, 0700) && errno != EEXIST)
		return -1;
	return openat(box->image, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* A directory of the host for a layer. In this namespace what is mounted in it is locked, and the kernel
 * shows nothing without what covers it: then the supervisor has passed a mount of it alone, which is
 * attached where nobody looks until `let_go`. */
static int open_layer(const struct box *box, const char *path, uint64_t same)
{
	if (!(same & SOURCE_ALONE))
		return open_source(box, path, same);
	int mount = box->descriptors[(same & ~(uint64_t)SOURCE_ALONE) - 1], point = hidden(box, "alone");
	if (point < 0)
		return -1;
	int failed = sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	int error = errno;
	close(point);
	errno = error;
	return failed ? -1 : openat(mount, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* The layers of an overlay that was made are its own; nothing else holds this mount. */
static int let_go(int layer, uint64_t same)
{
	return same & SOURCE_ALONE && (fchdir(layer) || umount2(".", MNT_DETACH)) ? -1 : 0;
}

/* A writable directory: a mount of its own, which stays writable when the root is sealed. One file system
 * for /tmp, /dev/shm, $HOME and a private overlay also means one size limit. */
static int scratch(struct box *box, const struct op *op)
{
	char name[16];
	snprintf(name, sizeof name, "%u", box->scratches++);
	int tree = -1, behind = written(box, name);
	if (behind < 0)
		return -1;
	if (fchmodat(behind, ".", (mode_t)op->a, 0) == 0)
		tree = sys_open_tree(behind, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
	int error = errno;
	close(behind);
	if (tree >= 0 && op->b && set_attributes(tree, op->b)) {
		error = errno;
		close(tree);
		tree = -1;
	}
	errno = error;
	return attach(box, tree, op->s[0], 1);
}

static int show(const struct box *box, const struct op *op)
{
	struct stat info;
	int source = sys_openat2(box->base, op->s[0], O_PATH, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
	if (source < 0 || fstat(source, &info))
		return -1;
	int tree = sys_open_tree(source, "",
				 OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
	close(source);
	return attach(box, tree, op->s[0], S_ISDIR(info.st_mode));
}

/* The layer that holds the masks of that number, to lie over the host's directory. */
static int masks(const struct box *box, uint64_t number)
{
	char name[24];
	snprintf(name, sizeof name, "mask%u", (unsigned)number);
	return hidden(box, name);
}

/* A whiteout: overlayfs takes a character device 0:0 in a layer for "there is no such name", whatever
 * the layers below have or get. The kernel lets everybody make this one. */
static int white_out(int directory, const char *name)
{
	struct stat info;
	if (mknodat(directory, name, S_IFCHR, 0) == 0)
		return 0;
	if (errno != EEXIST || fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW))
		return -1;
	errno = EEXIST;
	return S_ISCHR(info.st_mode) && info.st_rdev == 0 ? 0 : -1;
}

/* Makes a directory of masks look like the host's below it: what is merged shows the upper one's. */
static int resemble(int directory, int like)
{
	static const char acl[] = "system.posix_acl_access";
	struct stat info;
	char from[32], to[32], rules[4096];
	if (fstat(like, &info))
		return -1;
	mode_t mode = info.st_mode & 07777;
	/* An owner that has no number here stays the caller; the host's directory keeps its own guard. */
	if (fchownat(directory, "", info.st_uid, info.st_gid, AT_EMPTY_PATH) && errno != EINVAL &&
	    errno != EPERM)
		return -1;
	snprintf(from, sizeof from, "/proc/self/fd/%d", like);
	snprintf(to, sizeof to, "/proc/self/fd/%d", directory);
	ssize_t size = getxattr(from, acl, rules, sizeof rules);
	/* Where there is a list, the mode's group bits are its mask and would give too much alone. */
	if (size >= 0 ? setxattr(to, acl, rules, (size_t)size, 0) != 0
		      : errno != ENODATA && errno != EOPNOTSUPP)
		mode &= (mode_t)~070;
	const struct timespec times[2] = {info.st_atim, info.st_mtim};
	return fchmodat(directory, ".", mode, 0) || utimensat(directory, ".", times, 0) ? -1 : 0;
}

/* One step of a mask towards its name. 1: went on; 0: the name is hidden; -1: failed. */
static int step(int *at, int *source, const char *name, int last)
{
	int below = last ? -1 : openat(*source, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (below < 0)
		/* What is not there as a directory is hidden from there on, so that it cannot come. */
		return last || errno == ENOENT || errno == ENOTDIR || errno == ELOOP
			       ? white_out(*at, name)
			       : -1;
	close(*source);
	*source = below;
	if (mkdirat(*at, name, 0700) && errno != EEXIST)
		return -1;
	int next = openat(*at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (next < 0)
		return errno == ENOTDIR ? 0 : -1; /* another mask hides it already */
	close(*at);
	*at = next;
	return 1;
}

static int mask(const struct box *box, const struct op *op)
{
	char name[256];
	int source = open_source(box, op->s[2], op->b), at = source < 0 ? -1 : masks(box, op->a);
	const char *part = op->s[0] + strlen(op->s[1]) + 1;
	int result = at < 0 ? -1 : 1;
	while (result == 1) {
		size_t length = strcspn(part, "/");
		memcpy(name, part, length);
		name[length] = '\0';
		/* After its content, because a new name changes the times. */
		int directory = dup(at), like = dup(source);
		result = directory < 0 || like < 0 ? -1 : step(&at, &source, name, part[length] == '\0');
		if (result >= 0 && resemble(directory, like))
			result = -1;
		int error = errno;
		if (directory >= 0)
			close(directory);
		if (like >= 0)
			close(like);
		errno = error;
		part += length + 1;
	}
	int error = errno;
	if (source >= 0)
		close(source);
	if (at >= 0)
		close(at);
	errno = error;
	return result;
}

/* Where a private overlay keeps its changes. The merged root shows its owner and mode. */
static int private_upper(struct box *box, int lower)
{
	struct stat like;
	int upper = written(box, "upper");
	if (upper < 0 || fstat(lower, &like))
		return -1;
	/* An owner without a place in the id map cannot be given; the caller is shown then. */
	if (fchownat(upper, "", like.st_uid, like.st_gid, AT_EMPTY_PATH) && errno != EINVAL && errno != EPERM)
		return -1;
	if (fchmodat(upper, ".", like.st_mode & 07777, 0))
		return -1;
	/* For the supervisor, by a mount of its own: the root is sealed, and a closed directory must be opened. */
	box->upper = sys_open_tree(upper, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
	return box->upper < 0 ? -1 : upper;
}

static int overlay(struct box *box, const struct op *op, const char **culprit)
{
	/* By descriptor: overlayfs would split a path at ':' and ','. */
	char where[3][32], lower[72];
	unsigned masked = (unsigned)op->a & ~OVERLAY_PRIVATE;
	int layer[3] = {-1, -1, -1}, over = -1, mount = -1, error;
	for (int i = 0; i < 3; i++) {
		*culprit = op->s[i + 1];
		uint64_t same = i ? (op->b & ~(uint64_t)SOURCE_ALONE) + (unsigned)i : op->b;
		if (i == 0 || !(op->a & OVERLAY_PRIVATE))
			layer[i] = open_layer(box, op->s[i + 1], same);
		else
			layer[i] = i == 1 ? private_upper(box, layer[0]) : written(box, "work");
		if (layer[i] < 0)
			goto out;
		snprintf(where[i], sizeof where[i], "/proc/self/fd/%d", layer[i]);
	}
	*culprit = op->s[0];
	snprintf(lower, sizeof lower, "%s", where[0]);
	if (masked) {
		over = masks(box, masked);
		if (over < 0)
			goto out;
		snprintf(lower, sizeof lower, "/proc/self/fd/%d:%s", over, where[0]);
	}
	const struct option options[] = {{"lowerdir", lower},
					 {"upperdir", where[1]},
					 {"workdir", where[2]},
					 {"userxattr", NULL}};
	mount = new_mount("overlay", options, 4,
			  MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (unsigned)(op->a >> 32));
	if (mount >= 0 && let_go(layer[0], op->b)) {
		error = errno;
		close(mount);
		mount = -1;
		errno = error;
	}
out:
	error = errno;
	if (over >= 0)
		close(over);
	for (int i = 0; i < 3; i++)
		if (layer[i] >= 0)
			close(layer[i]);
	errno = error;
	return attach(box, mount, op->s[0], 1);
}

/* A directory of the host, read-only, as an overlay without an upper layer: connecting to a socket in
 * it fails, because the inode that is seen is not the one that somebody listens on. On a read-only
 * bind mount it would succeed, and the kernel's Landlock has no word against it. */
static int view(struct box *box, const struct op *op)
{
	/* Without an upper layer an overlay needs two lower ones. */
	int mount = -1, error, source = open_layer(box, op->s[1], op->b);
	int other = source < 0 ? -1 : op->a ? masks(box, op->a) : hidden(box, "empty");
	if (other >= 0) {
		char lower[64];
		snprintf(lower, sizeof lower, "/proc/self/fd/%d:/proc/self/fd/%d", op->a ? other : source,
			 op->a ? source : other);
		/* Without userxattr: marks that a program left in a writable tree must not hide files. */
		const struct option options[] = {{"lowerdir", lower}};
		mount = new_mount("overlay", options, 1,
				  MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
		if (mount >= 0 && let_go(source, op->b)) {
			error = errno;
			close(mount);
			mount = -1;
			errno = error;
		}
	}
	error = errno;
	if (source >= 0)
		close(source);
	if (other >= 0)
		close(other);
	errno = error;
	return attach(box, mount, op->s[0], 1);
}

/* Runs a small change in the directory that holds the path, on the private tmpfs only. */
static int make(const struct box *box, const struct op *op)
{
	char last[256];
	int parent = parent_of(box, op->s[0], last), result = -1;
	if (parent < 0)
		return -1;
	if (on_private(box, parent) == 0) {
		if (op->type == OP_DIR) {
			result = mkdirat(parent, last, (mode_t)op->a);
			if (result == 0 || errno == EEXIST)
				result = fchmodat(parent, last, (mode_t)op->a, 0);
		} else if (op->type == OP_LINK) {
			result = symlinkat(op->s[1], parent, last);
		} else {
			int file = openat(parent, last, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
					  (mode_t)op->a);
			if (file >= 0) {
				ssize_t written = write(file, op->blob, op->b);
				result = written >= 0 && (uint64_t)written == op->b ? 0 : -1;
				close(file);
			}
		}
	}
	leave(box, parent);
	return result;
}

int mount_op(struct box *box, const struct op *op, const char **culprit)
{
	static const struct option pts[] = {{"ptmxmode", "0666"}, {"mode", "0620"}, {"max", "512"}}; /* of 3072 for all */
	switch (op->type) {
	case OP_DIR:
	case OP_FILE:
	case OP_LINK:
		return make(box, op);
	case OP_BIND:
		*culprit = op->s[1];
		return bind(box, op);
	case OP_SCRATCH:
		return scratch(box, op);
	case OP_PROC:
		/* Read-only as a whole: to root without capabilities /proc/sys would be writable. */
		return attach(box,
			      new_mount("proc", NULL, 0,
					MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
						MOUNT_ATTR_NOEXEC),
			      op->s[0], 1);
	case OP_PTS:
		return attach(box, new_mount("devpts", pts, 3, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC),
			      op->s[0], 1);
	case OP_OVERLAY:
		return overlay(box, op, culprit);
	case OP_SHOW:
		return show(box, op);
	case OP_VIEW:
		*culprit = op->s[1];
		return view(box, op);
	case OP_MASK:
		return mask(box, op);
	}
	errno = EINVAL;
	return -1;
}

int mount_pivot(struct box *box)
{
	if (mount_seal(box))
		return -1;
	/* What was made in the image has mounts of its own. */
	if (box->image >= 0 && (fchdir(box->image) || umount2(".", MNT_DETACH)))
		return -1;
	/* pivot_root(".", ".") puts the old root on top of the new one, from where it is detached:
	 * no directory has to be made for it. */
	if (fchdir(box->root) || syscall(SYS_pivot_root, ".", "."))
		return -1;
	return umount2(".", MNT_DETACH) || chdir("/") ? -1 : 0;
}
