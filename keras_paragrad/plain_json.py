"""Reads untrusted JSON: from the environment, files and the network."""

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Parses JSON; any malformed text raises a `ValueError` with a short reason.

    `json.loads` may also raise a `RecursionError`, or an error about Python's limit on integer digits.

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
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise ValueError("it has a number with too many digits") from None
