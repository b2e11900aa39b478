"""Workspaces: the directory a run works in, and the layer that receives its changes."""
