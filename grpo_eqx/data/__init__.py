"""Sources of prompts, and the tokenizer that encodes them."""
