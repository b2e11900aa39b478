"""The process that owns one sandbox and serves its endpoints on a unix socket."""
