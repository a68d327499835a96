"""What `gpu.py` runs: modules of cases, each module in a process of its own."""
