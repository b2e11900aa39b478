"""Explain and learn: what a program tried, which wall refused it, and what would allow it."""
