"""Training: rollouts, credit, updates, checkpoints."""
