"""Sessions in a living sandbox: a shell or an interpreter that serves many runs, and background commands."""
