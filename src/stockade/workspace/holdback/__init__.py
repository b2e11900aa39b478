"""Which changes a commit leaves out."""
