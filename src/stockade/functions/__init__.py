"""Python in sandboxes: functions, the sealed channel, the executor, and interpreters started ahead of use."""
