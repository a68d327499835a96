"""How fast `fit` goes, and what it holds and costs."""
