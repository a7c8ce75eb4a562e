"""`python -m runtime PLAN --steps N`."""

import sys

from runtime.launch import main

sys.exit(main())
