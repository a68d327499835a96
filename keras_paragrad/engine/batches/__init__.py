"""The replicas' shares of a batch, which may be empty."""
