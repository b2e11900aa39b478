"""What goes over the wire: requests, answers, events and errors of the OpenSandbox contract."""
