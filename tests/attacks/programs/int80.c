/* getpid (20) through the 32-bit entry, which a filter of 64-bit numbers would take for writev. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	long value = 20;
	__asm__ volatile("int $0x80" : "+a"(value) : : "memory");
	printf("\"%s\"\n", value == getpid() ? "ok" : "ENOSYS");
	return 0;
}
