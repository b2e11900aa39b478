"""The endpoints of one sandbox: commands, shells, code and files."""
