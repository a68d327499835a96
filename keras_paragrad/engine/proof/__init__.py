"""How a batch is divided, and the proof. docs/guides/accumulation.md: "What the first batch proves"."""
