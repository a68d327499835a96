"""Models whose weights lie on parameter servers."""
