"""Faces of Stockade for other programs, each in a room of its own; none is loaded before it is used."""
