#ifndef STOCKADE_PROBE_H
#define STOCKADE_PROBE_H

/* Does one named thing for real and prints "name<TAB>ok|no<TAB>errno<TAB>detail".
 * Returns 0, or -1 for a name that is no probe (said in the same form, with EINVAL). */
int gate_probe(const char *name);

#endif
