"""Settings that all tests share.

Property tests draw the same examples on every run, so that a red build is red for everybody. To look for new
counterexamples: `pytest tests/property --hypothesis-profile=explore`.
"""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
