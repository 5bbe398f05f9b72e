"""How a loss becomes an update."""
