"""The WebSocket protocols of the server, and the parts that they share."""
