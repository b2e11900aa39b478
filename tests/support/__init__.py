"""What the tests stand on: means, leak checks, builds of the gate, the run as an ordinary user."""
