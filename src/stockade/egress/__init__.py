"""What reaches the network from a sandbox with rules: names, decoders, relay, resolver, records.

The program inside connects as if the network were its own; every connection
and every DNS query ends at the egress process, which decides by the rules of
the policy. That process is a copy of a warm template, so its modules load
only the standard library, `policy.net_rules` and each other.
"""
