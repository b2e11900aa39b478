"""Python functions in sandboxes: what is handed in, the sealed channel, what comes back, executors."""
