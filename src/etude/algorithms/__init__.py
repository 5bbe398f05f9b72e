"""How a batch becomes a loss."""
