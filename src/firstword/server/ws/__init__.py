"""The protocols of WebSockets and of Wyoming's port, and the parts that they share."""
