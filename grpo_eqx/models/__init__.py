"""Models: Qwen2 and its Hugging Face folder format."""
