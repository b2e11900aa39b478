"""What reaches the network: names, decoders, relay, resolver, records.

Two processes work here, neither of them the supervisor. The *egress* is a copy of a warm template, one per
sandbox, behind walls of its own: it answers the names that programs ask for, accepts their connections,
decides by the rules, dials and relays. `process` says which module does what. The *resolver* looks names up
for the egress processes of one supervisor. What the egress did, it writes to a memfd that the supervisor
reads (`records`). Modules here load only the standard library, the rules of `net` in `policy`, a few modules
of `linux`, and each other.
"""
