"""The work of a loop: attempts, items, landing, and what their threads share."""
