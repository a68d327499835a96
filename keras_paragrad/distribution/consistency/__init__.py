"""Checks that all workers train the same model in the same way, before the first step and once per epoch."""
