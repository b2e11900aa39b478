"""Root file systems that sandboxes of the server can have instead of the host's."""
