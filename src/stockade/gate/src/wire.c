/* Messages with descriptors, and whole files. */
#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* Room for as many descriptors as a launch may bring. */
static union {
	struct cmsghdr header;
	char bytes[CMSG_SPACE(sizeof(int) * (MAX_DESCRIPTORS + LAUNCH_FIRST))];
} control;

int send_message(int socket, const void *bytes, size_t size, const int *descriptors, unsigned count)
{
	struct iovec data = {(void *)(uintptr_t)bytes, size};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
	if (count) {
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
		memset(&control, 0, message.msg_controllen);
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int) * count);
		memcpy(CMSG_DATA(header), descriptors, sizeof(int) * count);
	}
	return sendmsg(socket, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

int send_reply(int socket, const struct reply *reply, const int *descriptors, unsigned count)
{
	return send_message(socket, reply, sizeof *reply, descriptors, count);
}

/* One message of at least `size` bytes; *more is the room for what follows them in `data`, and then how much did.
 * *count is the room for descriptors and then their number. 1 for a message, 0 at the end of the connection, -1 for
 * anything else (nothing is kept then). */
int receive_more(int socket, void *data, size_t size, size_t *more, int *descriptors, unsigned *count)
{
	struct iovec part = {data, size + *more};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control.bytes,
				 .msg_controllen = CMSG_SPACE(sizeof(int) * *count)};
	unsigned room = *count;
	*count = 0;
	ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
	if (got <= 0)
		return got == 0 ? 0 : -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	const int *passed = NULL;
	unsigned found = 0;
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
		passed = (const int *)CMSG_DATA(header);
		found = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
	}
	/* The space for them is rounded up, so that there may be one more than there is room for. */
	if ((size_t)got >= size && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && found <= room) {
		if (found)
			memcpy(descriptors, passed, found * sizeof(int));
		*count = found;
		*more = (size_t)got - size;
		return 1;
	}
	for (unsigned i = 0; i < found; i++)
		close(passed[i]);
	errno = EBADMSG;
	return -1;
}

int receive(int socket, void *data, size_t size, int *descriptors, unsigned *count)
{
	size_t more = 0;
	return receive_more(socket, data, size, &more, descriptors, count);
}

/* For what a program that resumes a template must not find in its copy of this memory. */
void wipe(void *bytes, size_t size)
{
	if (bytes)
		explicit_bzero(bytes, size);
}

int read_whole(int fd, size_t limit, unsigned char **bytes, size_t *size)
{
	struct stat info;
	if (fstat(fd, &info))
		return -1;
	if (info.st_size <= 0 || (uint64_t)info.st_size > limit) {
		errno = EMSGSIZE;
		return -1;
	}
	*size = (size_t)info.st_size;
	*bytes = malloc(*size);
	if (*bytes == NULL)
		return -1;
	for (size_t done = 0; done < *size;) {
		ssize_t got = pread(fd, *bytes + done, *size - done, (off_t)done);
		if (got <= 0) {
			free(*bytes);
			*bytes = NULL;
			errno = got == 0 ? EIO : errno;
			return -1;
		}
		done += (size_t)got;
	}
	return 0;
}
