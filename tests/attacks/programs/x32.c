/* getpid by its x32 number, which a filter of 64-bit numbers would not find on any list. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	long value = syscall(0x40000000L | SYS_getpid);
	printf("\"%s\"\n", value == getpid() ? "ok" : strerrorname_np(errno));
	return 0;
}
