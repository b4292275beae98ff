from hypothesis import settings

# Times here are those of a shared machine; what takes too long is the suite's timeout to catch.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
