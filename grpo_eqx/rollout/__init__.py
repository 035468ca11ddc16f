"""From prompts to rewarded groups of completions."""
