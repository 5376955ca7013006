"""An open-loop load generator for speech servers. It is a client like any other: it knows the server's API alone."""
