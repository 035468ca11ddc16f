"""The device side of training: the three programs, and everything their arrays go through."""
