"""The objects that users hold: Sandbox, Process, Workspace, Pool, Spawner; and delegation.

`stockade.runs` does the work behind them: `launch` raises the walls, `evidence`
inspects them, `supervise` watches a run, `finish` makes its result.
"""
