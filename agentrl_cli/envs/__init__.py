"""The world of an episode: tools as a world, and simulated users."""
