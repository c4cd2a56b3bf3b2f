"""The operator as a later version of it will be: it can render one engine template more."""

from __future__ import annotations

import sys

from kvloop_operator import facts

NEWER = "2"

if __name__ == "__main__":
    # Before whatever takes it from there is imported.
    facts.ENGINE_TEMPLATE_VERSIONS = (*facts.ENGINE_TEMPLATE_VERSIONS, NEWER)  # type: ignore[assignment]
    from kvloop_operator.__main__ import main

    sys.exit(main())
