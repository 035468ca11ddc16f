"""A run: its settings and what was passed in their place, and every object it is made of."""
