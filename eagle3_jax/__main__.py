"""`python -m eagle3_jax`: the `eagle3` command where it is not installed."""

from __future__ import annotations

import sys

from eagle3_jax.cli import main

sys.exit(main())
