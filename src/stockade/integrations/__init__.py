"""Faces for agent frameworks, one module per framework; each needs the extra of its name."""
