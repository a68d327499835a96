"""Trains models whose weights are on parameter servers. docs/guides/parameter_servers.md explains how."""
