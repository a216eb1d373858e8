"""lyray: trains one PyTorch model on unlike devices under a long-term cost budget."""
