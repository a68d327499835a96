"""Models whose weights are on parameter servers."""
