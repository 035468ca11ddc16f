"""Where prompts come from, and the tokenizer that encodes them."""
