"""The system call filter."""
