"""The stages of a pipeline, each on its devices."""
