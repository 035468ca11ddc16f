"""Tools that completions call, and the dialogues with them."""
