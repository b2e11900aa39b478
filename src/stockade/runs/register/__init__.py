"""The register of living sandboxes, and the log of earlier runs."""
