"""Trial runs on synthetic rows: whether examples, losses and states of a model depend on each other."""
