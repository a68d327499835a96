"""Fault tolerance: backups restored consistently on all workers, graceful SIGTERM, and errors naming lost workers."""
