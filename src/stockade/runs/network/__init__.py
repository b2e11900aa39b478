"""The network of a run with rules: egress process, resolver, decisions, changes, published ports."""
