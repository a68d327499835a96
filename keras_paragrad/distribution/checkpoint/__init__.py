"""Fault tolerance: backups that all workers restore alike, an orderly end on SIGTERM, and lost workers named."""
