"""Grouped-query attention, over contiguous keys and over a paged cache."""

from __future__ import annotations

from pallas_kernels.attention.reference import attention, causal_attention, paged_attention, write_pages

__all__ = ["attention", "causal_attention", "paged_attention", "write_pages"]
