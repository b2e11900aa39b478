"""Receipts: a signed record of every run, made by the parent, that anybody can verify later.

    run ─► account ─► statement ─► keys ─► chain        made, signed, linked to the one before
                                             │
                          verify ◄───────────┴──► a file

`account` gathers what is known about one run, `statement` is its form, `keys`
holds who signs, `chain` is the log of this state directory, and `verify`
needs none of that but a receipt and a public key.
"""
