"""What losses divide by, and what `fit` logs. docs/explanation/exactness.md: "What a part counts for"."""
