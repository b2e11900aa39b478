/* Descriptors that close themselves.
 *
 * `owned_fd file = open(...);` closes the file however the scope is left, and leaves errno alone, so that the caller
 * learns what failed and not how the tidying went. A function that hands the descriptor on says so with `take_fd`.
 * A scope that ends in _exit or execve closes nothing, and need not.
 */
#ifndef STOCKADE_FD_H
#define STOCKADE_FD_H

#include <errno.h>
#include <unistd.h>

/* Closes what is open, and remembers that it is not any more. */
static inline void close_fd(int *fd)
{
	int error = errno;
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	errno = error;
}

static inline void close_fds(int *fds, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		close_fd(&fds[i]);
}

/* The descriptor, which is its new owner's to close. */
static inline int take_fd(int *fd)
{
	int taken = *fd;
	*fd = -1;
	return taken;
}

#define owned_fd __attribute__((cleanup(close_fd))) int

#endif
