"""`python -m runtime PLAN --steps N`."""

import sys

from runtime.launch.launch import main

sys.exit(main())
