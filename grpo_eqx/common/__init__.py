"""What every layer may use: errors, choices, keys, files, safe text."""
