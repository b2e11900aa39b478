"""Repositories of the host: where they lie, and which files their version control runs."""
