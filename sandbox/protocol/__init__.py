"""What host and guest say to each other: frames on a socket, and plain values in them."""
