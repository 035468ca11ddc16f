"""What runs on devices: the three programs, and everything their arrays go through."""
