"""The train function, and the steps that it runs. docs/architecture.md: "One step" and "The path of a batch"."""
