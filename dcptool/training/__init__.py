"""How weights change: data, losses, the loop, evaluation, checkpoints."""
