"""`python -m hostward`."""

import sys

from hostward.cli import main

sys.exit(main())
