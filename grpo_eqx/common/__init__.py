"""Parts that every layer uses: errors, choices, keys of random draws, files, safe text."""
