"""Connections whose requests are read: TLS ends here, and begins anew towards the server.

Hosts with rules for requests come here, and plain rules for port 80. A `TerminatedConnection` has the
connection of a program on one side and those to its server on the other. Each request is decoded, judged by
the rules, handed to an `HttpExchange` and encoded anew: no byte of a head is passed on as it came. What
leads it to the server is a `ServerRoute`.
"""
