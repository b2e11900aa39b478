"""Python in sandboxes: interpreters that are started ahead, and what runs in them."""
