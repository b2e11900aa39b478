"""Decoders of hostile bytes: DNS questions, TLS hellos, HTTP requests."""
