"""`stockade mcp`: sandboxed tools for clients of the Model Context Protocol.

The server runs outside, with the user's rights, and holds one sandbox, which its tools use. The user fixes
the policy when the server starts. A tool's arguments come from a model, which may follow what hostile files
told it, so no argument can change the policy: tools choose what to run, never what it may touch.
"""
