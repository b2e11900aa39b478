"""Isolated sessions: further sandboxes over the trees of one sandbox."""
