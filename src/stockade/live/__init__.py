"""Sandboxes that live for a while: warm ones, and what runs in them from one command to the next."""
