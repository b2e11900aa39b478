"""One run from start to end: prepare, launch, evidence, supervise, outcome."""
