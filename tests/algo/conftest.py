"""Property tests run the same cases every time, without a time limit on each: the machine may be busy."""

from hypothesis import settings

settings.register_profile("algo", deadline=None, derandomize=True)
settings.load_profile("algo")
