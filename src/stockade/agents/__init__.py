"""Agents: named handlers, each with a policy and a switch of its own.

    registry ─► policies ─► handler
    which agents there are   what each may   a function whose calls run in a sandbox

The registry lies in the log of receipts: each agent has a row there, and the
row names the signed event that last changed it.
"""
