"""How a batch is divided into parts, as a value."""
