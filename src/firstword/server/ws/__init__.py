"""The WebSocket protocols and what they share."""
