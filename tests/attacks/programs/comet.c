/* Forks and exits in a chain that never stays in one process: HEADS MICROSECONDS [deaf].
 * Each lives as long as it is told and is in a session of its own; "deaf" ignores every signal that can be. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000;
}

static void fly(int64_t life)
{
	for (;;) {
		setsid();
		pid_t next = fork();
		if (next > 0)
			_exit(0);
		for (int64_t end = now_us() + life; next == 0 && now_us() < end;)
			;
	}
}

int main(int argc, char **argv)
{
	int heads = argc > 1 ? atoi(argv[1]) : 1;
	int64_t life = argc > 2 ? atoi(argv[2]) : 0;
	for (int number = 1; argc > 3 && number < NSIG; number++)
		signal(number, SIG_IGN);
	puts("flying");
	fflush(stdout);
	for (int i = 0; i < heads; i++)
		if (fork() == 0)
			fly(life);
	for (;;)
		pause();
}
