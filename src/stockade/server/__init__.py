"""The HTTP face of Stockade: sandboxes and sessions for clients of the OpenSandbox contract."""
