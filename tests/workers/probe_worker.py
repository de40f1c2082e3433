"""One rank of `hvd-hetero probe ARGUMENTS`, started without the console script."""

import sys

from hvd_hetero.cli.main import main

sys.exit(main(["probe", *sys.argv[1:]]))
