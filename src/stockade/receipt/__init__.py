"""Receipts: a signed record of every run, made by the supervisor, that anyone can verify later.

    run ─► account ─► statement ─► keys ─► chain        made, signed, linked to the one before
                                             │
                          verify ◄───────────┴──► a file

`account` gathers what is known about one run, `statement` defines the content of a receipt, `keys` holds the
signing keys, `chain` is the log of a state directory, and `verify` needs only a receipt and a public key.
"""
