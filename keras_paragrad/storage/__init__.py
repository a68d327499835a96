"""Where a variable's value lives: in shards, one on each replica."""
