"""What losses divide by, and what `fit` and `evaluate` show of them."""
