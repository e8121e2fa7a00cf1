"""The short causal depthwise convolution in front of a delta-rule layer."""

from __future__ import annotations

from pallas_kernels.causal_conv.reference import causal_conv

__all__ = ["causal_conv"]
