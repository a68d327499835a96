"""Calls and traces models without side effects, and frees their graphs. docs/architecture.md: "The house"."""
