"""Kept sessions: one terminal, several clients."""
