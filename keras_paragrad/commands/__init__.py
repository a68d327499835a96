"""A module for each command of `python -m keras_paragrad`, with `add_arguments(parser)` and `run(arguments) -> int`."""
