"""Reading JSON that others wrote: from the environment, from files and from the network."""

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """What JSON holds, or a `ValueError` that says in a few words why there is none, whatever the text is.

    Python's own reader also ends with a `RecursionError`, and with an error about a conversion that nobody asked for.

    Example:

    >>> from keras_paragrad.plain_json import read_json
    >>> read_json('{"workers": 2}')
    {'workers': 2}
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError:  # Python converts no integers of thousands of digits
        raise ValueError("it has a number of too many digits") from None
