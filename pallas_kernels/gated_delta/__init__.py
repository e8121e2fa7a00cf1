"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464).

One recurrence, three uses: `chunked` for prefill and training, `window` for the few tokens that one cycle verifies
without touching the committed state, `fold` to write the accepted ones into it later.
"""

from __future__ import annotations

from pallas_kernels.gated_delta.reference import chunked, fold, recurrent, window

__all__ = ["chunked", "fold", "recurrent", "window"]
