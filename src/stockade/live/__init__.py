"""Sessions in a living sandbox: one shell or interpreter, many runs."""
