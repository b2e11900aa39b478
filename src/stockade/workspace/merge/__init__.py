"""Merge changes of several workspaces, and of the host, into one tree."""
