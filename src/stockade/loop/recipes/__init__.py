"""Recipes: how each coding agent is found, started inside a sandbox, and read.

    recipe ─► streams
    program, policy, prompt    the agent's own output → readable lines, cost, rate limits

`policies/` has one policy for each agent: its files, its key and its hosts.
"""
