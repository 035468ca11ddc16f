"""Model families: each a config that says what `Decoder` computes."""
