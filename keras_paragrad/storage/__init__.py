"""Where a variable's value lives: whole, in shards, or on a mesh."""
