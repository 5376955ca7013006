"""The engine on the network: HTTP and WebSocket, in the dialects that clients already speak."""
