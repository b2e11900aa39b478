"""Faces for other programs, one module or folder each; each needs the extra of its name."""
