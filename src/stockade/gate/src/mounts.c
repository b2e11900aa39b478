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
	owned_fd context = sys_fsopen(type);
	if (context < 0)
		return -1;
	for (unsigned i = 0; i < count; i++)
		if (sys_fsconfig(context, options[i].value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, options[i].key,
				 options[i].value))
			return -1;
	return sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL) ? -1 : sys_fsmount(context, attributes);
}

/* Where the resident keeps the base: a directory that every system has and no policy may grant.
 * (Not "/": a process whose root is covered counts as chrooted and may not make user namespaces.) */
#define BASE_PLACE "/sys"

/* A tmpfs, attached: submounts need a root that is attached somewhere. */
static int new_tree(struct tree *tree, uint64_t size, uint64_t inodes, const char *place)
{
	char bytes[32], files[32];
	snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)size);
	snprintf(files, sizeof files, "%llu", (unsigned long long)inodes);
	const struct option options[] = {{"mode", "0755"}, {"size", bytes}, {"nr_inodes", files}};
	tree->root = new_mount("tmpfs", options, size ? 3 : 1, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	struct stat info;
	if (tree->root < 0 || fstat(tree->root, &info))
		return -1;
	tree->root_device = info.st_dev;
	return sys_move_mount(tree->root, "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH);
}

int mount_base(struct tree *tree)
{
	return new_tree(tree, 0, 0, BASE_PLACE);
}

int mount_base_drop(void)
{
	return umount2(BASE_PLACE, MNT_DETACH);
}

int mount_seal(const struct tree *tree)
{
	struct mount_attr sealed = {.attr_set = MOUNT_ATTR_RDONLY};
	return sys_mount_setattr(tree->root, "", AT_EMPTY_PATH, &sealed);
}

int mount_root(struct tree *tree, const struct op *op)
{
	/* Over "/" there is always a place, and it hides nothing from init: its own root stays below. */
	tree->base = open(BASE_PLACE, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (tree->base < 0 || new_tree(tree, op->a, op->b, "/"))
		return -1;
	static const char canary[] = "canary";
	if (mknodat(tree->root, canary, S_IFREG | 0600, 0))
		return -1;
	tree->canary = openat(tree->root, canary, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	return tree->canary < 0 || unlinkat(tree->root, canary, 0) ? -1 : 0;
}

static int on_private(const struct tree *tree, int directory)
{
	struct stat info;
	if (directory == tree->root)
		return 0;
	if (fstat(directory, &info))
		return -1;
	if (info.st_dev != tree->root_device && (tree->image < 0 || info.st_dev != tree->image_device)) {
		errno = EROFS;
		return -1;
	}
	return 0;
}

/* Closes what `parent_of` gave. */
static void close_parent(const struct tree *tree, int parent)
{
	if (parent != tree->root)
		close_fd(&parent);
}

/* The directory that holds the last part of the path, made where it is missing. */
static int parent_of(const struct tree *tree, const char *path, char *last)
{
	int at = tree->root;
	const char *part = path + 1;
	while (at >= 0) {
		size_t length = strcspn(part, "/");
		memcpy(last, part, length);
		last[length] = '\0';
		if (part[length] == '\0')
			return at;
		int next = openat(at, last, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (next < 0 && errno == ENOENT && on_private(tree, at) == 0 &&
		    mkdirat(at, last, 0755) == 0)
			next = openat(at, last, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		close_parent(tree, at);
		at = next;
		part += length + 1;
	}
	return -1;
}

/* A mount point of the right kind at the path, as a descriptor. */
static int mount_point(const struct tree *tree, const char *path, int directory)
{
	char last[256];
	int parent = parent_of(tree, path, last);
	if (parent < 0)
		return -1;
	int point = openat(parent, last, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (point < 0 && errno == ENOENT && on_private(tree, parent) == 0) {
		int made = directory ? mkdirat(parent, last, 0755)
				     : mknodat(parent, last, S_IFREG | 0444, 0);
		if (made == 0)
			point = openat(parent, last, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	}
	close_parent(tree, parent);
	return point;
}

/* Attaches a detached mount, if there is one, at the path. */
static int attach(const struct tree *tree, int mount, const char *path, int directory)
{
	if (mount < 0)
		return -1;
	owned_fd point = mount_point(tree, path, directory);
	return point < 0 ? -1
			 : sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* Opens a path of the host in this mount namespace. `same` is the descriptor through which the
 * supervisor judged it, + 1: it belongs to another mount namespace and cannot be mounted itself,
 * but while it is open its inode number cannot be reused, so equal numbers mean the same file. */
int open_source(const int *descriptors, const char *path, uint64_t same)
{
	owned_fd source = sys_openat2(AT_FDCWD, path, O_PATH, RESOLVE_NO_SYMLINKS);
	if (source < 0 && same && errno == ENOENT)
		errno = NOT_THE_SAME_FILE; /* it is in a file system that was mounted after the gate copied the mounts */
	if (source < 0 || same == 0)
		return take_fd(&source);
	struct stat now, then;
	if (fstat(source, &now) || fstat(descriptors[same - 1], &then) ||
	    now.st_dev != then.st_dev || now.st_ino != then.st_ino) {
		errno = NOT_THE_SAME_FILE;
		return -1;
	}
	return take_fd(&source);
}

static int mount_bind(const struct tree *tree, const struct op *op)
{
	struct stat info;
	owned_fd source = open_source(tree->descriptors, op->s[1], op->b);
	if (source < 0 || fstat(source, &info))
		return -1;
	owned_fd mount = sys_open_tree(source, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
	if (mount < 0 || set_attributes(mount, op->a))
		return -1;
	return attach(tree, mount, op->s[0], S_ISDIR(info.st_mode));
}

/* A directory on the private tmpfs that no program finds: it lies below /proc, over which the real one is
 * mounted last. */
int unseen_directory(const struct tree *tree, const char *name)
{
	char path[32];
	snprintf(path, sizeof path, "proc/%s", name);
	if (mkdirat(tree->root, "proc", 0555) && errno != EEXIST)
		return -1;
	if (mkdirat(tree->root, path, 0700) && errno != EEXIST)
		return -1;
	owned_fd directory = openat(tree->root, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory >= 0 && on_private(tree, directory)) {
		errno = EROFS;
		return -1;
	}
	return take_fd(&directory);
}

/* Only from an attached mount can be cloned, so this one is attached in an unseen directory; `mount_pivot` detaches
 * it. */
int mount_image(struct tree *tree, const struct op *op)
{
	struct stat info;
	int mount = tree->descriptors[op->b - 1];
	owned_fd point = unseen_directory(tree, "image");
	if (point < 0 ||
	    sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH))
		return -1;
	tree->image = openat(mount, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (tree->image < 0 || fstat(tree->image, &info))
		return -1;
	tree->image_device = info.st_dev;
	return 0;
}

/* A directory for what programs write: in the image if there is one, else on the private tmpfs. */
static int writable_directory(const struct tree *tree, const char *name)
{
	if (tree->image < 0)
		return unseen_directory(tree, name);
	/* It is there already where this is the second attempt; only the gate has written there so far. */
	if (mkdirat(tree->image, name, 0700) && errno != EEXIST)
		return -1;
	return openat(tree->image, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* A directory of the host for a layer. In this namespace what is mounted in it is locked, and the kernel
 * shows nothing without what covers it: then the supervisor has passed a mount of it alone, which is
 * attached in an unseen directory until `detach_layer`. */
static int open_layer(const struct tree *tree, const char *path, uint64_t same)
{
	if (!(same & SOURCE_ALONE))
		return open_source(tree->descriptors, path, same);
	int mount = tree->descriptors[(same & ~(uint64_t)SOURCE_ALONE) - 1];
	owned_fd point = unseen_directory(tree, "alone");
	if (point < 0 ||
	    sys_move_mount(mount, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH))
		return -1;
	return openat(mount, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* The layers of an overlay that was made are its own; nothing else holds this mount. */
static int detach_layer(int layer, uint64_t same)
{
	return same & SOURCE_ALONE && (fchdir(layer) || umount2(".", MNT_DETACH)) ? -1 : 0;
}

/* A writable directory: a mount of its own, which stays writable when the root is sealed. One file system
 * for /tmp, /dev/shm, $HOME and a private overlay also means one size limit. */
static int mount_scratch(struct tree *tree, const struct op *op)
{
	char name[16];
	snprintf(name, sizeof name, "%u", tree->scratches++);
	owned_fd behind = writable_directory(tree, name);
	if (behind < 0 || fchmodat(behind, ".", (mode_t)op->a, 0))
		return -1;
	owned_fd mount = sys_open_tree(behind, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
	if (mount < 0 || (op->b && set_attributes(mount, op->b)))
		return -1;
	return attach(tree, mount, op->s[0], 1);
}

static int mount_show(const struct tree *tree, const struct op *op)
{
	struct stat info;
	owned_fd source = sys_openat2(tree->base, op->s[0], O_PATH, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
	if (source < 0 || fstat(source, &info))
		return -1;
	owned_fd mount = sys_open_tree(source, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
	return attach(tree, mount, op->s[0], S_ISDIR(info.st_mode));
}

/* A directory of a private overlay, by number; the first one has none, and is looked for by that name in an image. */
static int numbered_directory(const struct tree *tree, const char *word, unsigned number)
{
	char name[24];
	if (number == 0)
		return writable_directory(tree, word);
	snprintf(name, sizeof name, "%s%u", word, number);
	return writable_directory(tree, name);
}

/* Where a private overlay keeps its changes. The merged root shows its owner and mode. */
static int private_upper(struct tree *tree, int lower)
{
	struct stat like;
	if (tree->overlays == MAX_OVERLAYS) {
		errno = E2BIG;
		return -1;
	}
	owned_fd upper = numbered_directory(tree, "upper", tree->overlays);
	if (upper < 0 || fstat(lower, &like))
		return -1;
	/* An owner without a place in the id map cannot be given; the caller is shown then. */
	if (fchownat(upper, "", like.st_uid, like.st_gid, AT_EMPTY_PATH) && errno != EINVAL && errno != EPERM)
		return -1;
	if (fchmodat(upper, ".", like.st_mode & 07777, 0))
		return -1;
	/* For the supervisor, by a mount of its own: the root is sealed, and a closed directory must be opened. */
	int held = sys_open_tree(upper, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
	if (held < 0)
		return -1;
	tree->uppers[tree->overlays++] = held;
	return take_fd(&upper);
}

static int mount_overlay(struct tree *tree, const struct op *op, const char **culprit)
{
	uint64_t same = op->b & ~(uint64_t)SOURCE_ALONE;
	unsigned masked = (unsigned)op->a & ~OVERLAY_PRIVATE;
	int private = (op->a & OVERLAY_PRIVATE) != 0;
	*culprit = op->s[1];
	owned_fd lower = open_layer(tree, op->s[1], op->b);
	if (lower < 0)
		return -1;
	*culprit = op->s[2];
	owned_fd upper = private ? private_upper(tree, lower) : open_source(tree->descriptors, op->s[2], same + 1);
	if (upper < 0)
		return -1;
	*culprit = op->s[3];
	owned_fd work = private ? numbered_directory(tree, "work", tree->overlays - 1)
			       : open_source(tree->descriptors, op->s[3], same + 2);
	if (work < 0)
		return -1;
	*culprit = op->s[0];
	owned_fd masks = masked ? mask_layer(tree, masked) : -1;
	if (masked && masks < 0)
		return -1;
	/* By descriptor: overlayfs would split a path at ':' and ','. */
	char lower_path[72], upper_path[32], work_path[32];
	if (masked)
		snprintf(lower_path, sizeof lower_path, "/proc/self/fd/%d:/proc/self/fd/%d", masks, lower);
	else
		snprintf(lower_path, sizeof lower_path, "/proc/self/fd/%d", lower);
	snprintf(upper_path, sizeof upper_path, "/proc/self/fd/%d", upper);
	snprintf(work_path, sizeof work_path, "/proc/self/fd/%d", work);
	const struct option options[] = {{"lowerdir", lower_path},
					 {"upperdir", upper_path},
					 {"workdir", work_path},
					 {"userxattr", NULL}};
	owned_fd mount = new_mount("overlay", options, 4,
				   MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (unsigned)(op->a >> 32));
	if (mount < 0 || detach_layer(lower, op->b))
		return -1;
	return attach(tree, mount, op->s[0], 1);
}

/* A directory of the host, read-only, as an overlay without an upper layer: connecting to a socket in
 * it fails, because the inode that is seen is not the one that a server listens on. On a read-only
 * bind mount it would succeed, and the kernel's Landlock has no word against it. */
static int mount_view(struct tree *tree, const struct op *op)
{
	owned_fd source = open_layer(tree, op->s[1], op->b);
	if (source < 0)
		return -1;
	/* Without an upper layer an overlay needs two lower ones. */
	owned_fd other = op->a ? mask_layer(tree, op->a) : unseen_directory(tree, "empty");
	if (other < 0)
		return -1;
	char lower[64];
	snprintf(lower, sizeof lower, "/proc/self/fd/%d:/proc/self/fd/%d", op->a ? other : source,
		 op->a ? source : other);
	/* Without userxattr: marks that a program left in a writable tree must not hide files. */
	const struct option options[] = {{"lowerdir", lower}};
	owned_fd mount = new_mount("overlay", options, 1, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	if (mount < 0 || detach_layer(source, op->b))
		return -1;
	return attach(tree, mount, op->s[0], 1);
}

static int make_file(int parent, const char *name, const struct op *op)
{
	owned_fd file = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, (mode_t)op->a);
	if (file < 0)
		return -1;
	ssize_t wrote = write(file, op->blob, op->b);
	return wrote >= 0 && (uint64_t)wrote == op->b ? 0 : -1;
}

static int make_directory(int parent, const char *name, mode_t mode)
{
	return mkdirat(parent, name, mode) && errno != EEXIST ? -1 : fchmodat(parent, name, mode, 0);
}

/* A directory, a link or a file, on the private tmpfs only. */
static int make_entry(const struct tree *tree, const struct op *op)
{
	char last[256];
	int result = -1, parent = parent_of(tree, op->s[0], last);
	if (parent < 0)
		return -1;
	if (on_private(tree, parent) == 0)
		result = op->type == OP_DIR    ? make_directory(parent, last, (mode_t)op->a)
			 : op->type == OP_LINK ? symlinkat(op->s[1], parent, last)
					       : make_file(parent, last, op);
	close_parent(tree, parent);
	return result;
}

/* A file system of the kernel's own, at a path. */
static int mount_new(const struct tree *tree, const struct op *op, const char *type, const struct option *options,
		     unsigned count, unsigned attributes)
{
	owned_fd mount = new_mount(type, options, count, attributes);
	return attach(tree, mount, op->s[0], 1);
}

int mount_op(struct tree *tree, const struct op *op, const char **culprit)
{
	static const struct option pts[] = {{"ptmxmode", "0666"}, {"mode", "0620"}, {"max", MOST_TERMINALS}};
	switch (op->type) {
	case OP_DIR:
	case OP_FILE:
	case OP_LINK:
		return make_entry(tree, op);
	case OP_BIND:
		*culprit = op->s[1];
		return mount_bind(tree, op);
	case OP_SCRATCH:
		return mount_scratch(tree, op);
	case OP_PROC:
		/* Read-only as a whole: to root without capabilities /proc/sys would be writable. */
		return mount_new(tree, op, "proc", NULL, 0,
				 MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
	case OP_PTS:
		return mount_new(tree, op, "devpts", pts, 3, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
	case OP_OVERLAY:
		return mount_overlay(tree, op, culprit);
	case OP_SHOW:
		return mount_show(tree, op);
	case OP_VIEW:
		*culprit = op->s[1];
		return mount_view(tree, op);
	case OP_MASK:
		return mask_name(tree, op);
	}
	errno = EINVAL;
	return -1;
}

int mount_pivot(struct tree *tree)
{
	if (mount_seal(tree))
		return -1;
	/* What was made in the image has mounts of its own. */
	if (tree->image >= 0 && (fchdir(tree->image) || umount2(".", MNT_DETACH)))
		return -1;
	/* pivot_root(".", ".") puts the old root on top of the new one, from where it is detached:
	 * no directory has to be made for it. */
	if (fchdir(tree->root) || syscall(SYS_pivot_root, ".", "."))
		return -1;
	return umount2(".", MNT_DETACH) || chdir("/") ? -1 : 0;
}
