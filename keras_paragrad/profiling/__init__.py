"""Seeing where a training's time and its gradient go."""
