"""A replica's rows of a batch, of which there may be none. docs/guides/distribution.md: "What a step does"."""
