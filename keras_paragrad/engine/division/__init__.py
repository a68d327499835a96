"""How a batch is divided, and the proof that its parts give what the whole gives."""
