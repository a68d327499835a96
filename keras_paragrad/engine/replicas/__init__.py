"""Several devices and workers: collectives, empty shards, a model prepared for them."""
