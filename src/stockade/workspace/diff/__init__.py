"""What changed in a workspace."""
