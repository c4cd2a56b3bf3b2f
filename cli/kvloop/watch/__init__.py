"""Looking at routers that run: ``kvloop explain`` and ``kvloop top``."""
