"""What runs at the server: the round driver around any Flower strategy, checks, mean, checkpoints."""
