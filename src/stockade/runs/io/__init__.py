"""The event loop of a run, and its streams."""
