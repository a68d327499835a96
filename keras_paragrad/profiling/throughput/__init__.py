"""Speed, memory and cost of `fit`."""
