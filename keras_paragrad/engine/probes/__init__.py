"""Trial runs on made-up rows: whether examples, losses and states of a model depend on each other."""
