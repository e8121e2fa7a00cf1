"""The short causal depthwise convolution in front of a delta-rule layer; also over a tree of drafts."""

from __future__ import annotations

from pallas_kernels.causal_conv.reference import causal_conv, causal_conv_tree, tree_tail

__all__ = ["causal_conv", "causal_conv_tree", "tree_tail"]
