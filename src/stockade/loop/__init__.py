"""Unattended coding agents: work items, attempts in sandboxes, a judge that the agent does not run."""
