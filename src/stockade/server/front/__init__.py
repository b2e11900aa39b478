"""The server's own process: keys, the lifecycle of sandboxes, and the relay to their supervisors."""
