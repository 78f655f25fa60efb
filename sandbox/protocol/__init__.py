"""The protocol between host and guest: frames on a socket, and plain values in them."""
