"""A model's stages on devices of their own."""
