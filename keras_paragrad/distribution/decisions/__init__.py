"""The decisions of the plan, a module for related ones; and the values that arguments may give them.

Free of TensorFlow, for the help of commands.
"""

STRATEGIES = ("auto", "none", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server")
COMMUNICATIONS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")
SHARD_POLICIES = ("auto", "data", "file", "already_sharded")
WEIGHTINGS = ("auto", "examples", "sample_weight", "mask", "sum")
# A year, in seconds: the waiting system calls do not accept more.
LONGEST_WAIT = 365 * 24 * 3600
# The largest count in a described machine or cluster: planning for more takes minutes and exhausts memory.
MOST_DESCRIBED = 10_000
LAYOUTS = (None, "auto")
SHARDS = (None, "optimizer", "parameters")
