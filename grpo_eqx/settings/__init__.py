"""Settings of a run: the config, its checks, types and files, and recipes."""
