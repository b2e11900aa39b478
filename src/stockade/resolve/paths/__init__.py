"""The paths that a policy names: which exist, are hidden or protected, and which links they may follow."""
