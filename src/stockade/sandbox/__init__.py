"""Sandboxes: a policy and a backend, living.

`sandbox` is what users meet, `launch` raises the walls, `evidence` looks at
them, `supervise` watches a run, `result` says how it ended.
"""
