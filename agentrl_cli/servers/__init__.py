"""Child processes and servers: chat session, what-if, tool server, screens in a browser."""
