"""Wrappers for the kernel that know nothing of policies: descriptors, mounts, processes, cgroups."""
