"""An OpenAI-compatible endpoint on the sampler."""
