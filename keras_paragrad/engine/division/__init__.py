"""How a batch is divided: parts of the loss, or parts of the calls of layers."""
