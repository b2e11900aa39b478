"""Agents: handlers that have a name, and by it a policy and a switch of their own.

    registry ─► policies ─► handler
    which agents there are   what each may   a function whose calls run in a sandbox

The registry is in the log of receipts: how an agent stands is a row there,
and each row names the signed event that made it so.
"""
