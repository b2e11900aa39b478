"""Apply a policy to this machine: find its files, paths, programs, and what the user trusts."""
