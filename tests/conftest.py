"""What the whole suite shares: how hard hypothesis looks."""

from hypothesis import settings

settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=300, deadline=None)
settings.load_profile("default")
