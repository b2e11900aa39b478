"""Plans for other systems. They can be read; nothing runs them yet."""
