"""Training a model from text files: corpus, tokens, packing, loss, optimizer, checkpoints, metrics and the loop."""
