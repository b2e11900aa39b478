#include "gate.h"
#include "probe.h"

#include <stdio.h>
#include <string.h>

#ifdef GATE_SABOTAGE
extern const char *sabotage_order;
#endif

int main(int argc, char **argv)
{
#ifdef GATE_SABOTAGE
	if (argc > 3)
		sabotage_order = argv[3];
#endif
	if (argc > 1 && strcmp(argv[1], "resident") == 0)
		return resident_main(argc, argv);
	if (argc > 3 && strcmp(argv[1], "template") == 0)
		return template_start(argv + 2);
	if (argc > 2 && strcmp(argv[1], "helped") == 0)
		helped_main(argc, argv);
	if (argc > 1 && strcmp(argv[1], "probe") == 0) {
		int failed = 0;
		for (int i = 2; i < argc; i++)
			failed |= gate_probe(argv[i]);
		return failed;
	}
	fputs("stockade-gate is started by Stockade: type `stockade run COMMAND` instead.\n", stderr);
	return 2;
}
