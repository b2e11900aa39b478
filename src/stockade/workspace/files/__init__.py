"""The files of a sandbox, from outside."""
