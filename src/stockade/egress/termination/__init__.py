"""Connections whose requests are judged: TLS ends here, and begins anew towards the server.

Only hosts with HTTP rules come here. One `TerminatedConnection` has the connection of a program on one side
and one connection to the server on the other. Both sides speak the same version of HTTP, so no request is
ever translated from one version to the other. Each request is decoded, judged by the rules, handed to an
`HttpExchange` and encoded anew: no byte of a head is passed on as it came.
"""
