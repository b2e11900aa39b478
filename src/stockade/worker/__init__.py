"""Python in sandboxes: functions, the sealed channel, executors, and interpreters that are started ahead."""
