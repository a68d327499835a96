"""Runs the stages of a pipeline, each on its devices. docs/guides/pipeline.md explains pipelines."""
