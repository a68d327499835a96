"""`python -m keras_paragrad`, which is `keras-paragrad`."""

import sys

from keras_paragrad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
