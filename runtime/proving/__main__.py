"""`python -m runtime.proving REQUEST --notes FOLDER`."""

import sys

from runtime.proving.rank import main

sys.exit(main())
