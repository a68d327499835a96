"""The stages of a step: gradient, sum of parts, update. docs/architecture.md: "One step"."""
