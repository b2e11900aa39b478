/* Says as whom it runs and with which capabilities. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
	char line[256];
	unsigned long long permitted = 0, effective = 0;
	FILE *status = fopen("/proc/self/status", "r");
	while (status && fgets(line, sizeof line, status)) {
		sscanf(line, "CapPrm: %llx", &permitted);
		sscanf(line, "CapEff: %llx", &effective);
	}
	printf("{\"uid\": %d, \"euid\": %d, \"egid\": %d, \"permitted\": %llu, \"effective\": %llu}\n",
	       getuid(), geteuid(), getegid(), permitted, effective);
	return 0;
}
