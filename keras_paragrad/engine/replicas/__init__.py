"""Training, evaluation and prediction on replicas, whose batches may be empty."""
