"""What `stockade demo` shows: an agent that does its job, and five things that nobody asked for.

`ground` makes a project, a home with a decoy key, a neighbour and a listener,
all in one temporary directory; `agent` is the program that is run in a real
sandbox over that project; `verdict` compares what the agent says it met with
what the host shows; `screen` draws both sides of the wall.
"""
