"""The judge of attempts: its files, the run of the verify command, and what that says."""
