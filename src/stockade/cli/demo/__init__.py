"""`stockade demo`: an agent does its job, and tries five things that it must not do.

`fixture` makes a project, a home with a decoy key, a neighbour and a listener,
all in one temporary directory; `inside.demo_agent` is the program that runs in
a real sandbox over that project; `findings` compares what the agent reports
with what the host shows; `screen` draws both sides of the wall.
"""
