"""Why a run failed, in words: the gate refused, the command did not start, the program failed."""
