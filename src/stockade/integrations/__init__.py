"""Faces: Stockade as a part of other frameworks, one module for each."""
