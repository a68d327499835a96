"""The train function and the stages of a step."""
