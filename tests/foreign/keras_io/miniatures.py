"""All miniatures: these modules fill the table when they are imported."""

from foreign.keras_io import altered, compared, fitted, layered, losses, stepped
from foreign.keras_io.miniature import MINIATURES

__all__ = ["MINIATURES", "altered", "compared", "fitted", "layered", "losses", "stepped"]
