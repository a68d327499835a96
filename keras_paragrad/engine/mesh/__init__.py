"""Runs steps on a mesh of devices, by DTensor. docs/guides/mesh.md explains meshes."""
