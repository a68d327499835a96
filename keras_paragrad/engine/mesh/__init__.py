"""Variables, batches and steps on a mesh of devices."""
