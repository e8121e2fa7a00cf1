"""Verification of a window of drafts: `verify` by coupling, `verify_standard` by rejection sampling.

Coupling samples every row of a window as the plain sampler would, and lets drafts stand that agree with the samples.
Logits are processed in float32 (stop ids masked before min_tokens, temperature, min_p, top_k, top_p); a token is the
argmax of processed logits plus Gumbel noise that belongs to its position; drafts are accepted while they equal these.
`token_noise` gives the noise of some tokens only, which is all that a drafter with a smaller vocabulary needs.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from pallas_kernels import dispatch
from pallas_kernels.verification import reference
from pallas_kernels.verification.drawing import draw, likeliest, noise, token_noise
from pallas_kernels.verification.reference import leading, mask_stops, position_keys, process, thresholded
from pallas_kernels.verification.sampling import Asks, Feature, Sampling
from pallas_kernels.verification.standard import verify_standard
from pallas_kernels.verification.thresholds import kept

__all__ = [
    "Asks", "Feature", "Sampling", "draw", "kept", "leading", "likeliest", "mask_stops", "noise",
    "position_keys", "process", "thresholded", "token_noise", "verify", "verify_standard",
]  # fmt: skip


def verify(
    logits: Array, drafts: Array, keys: Array, sampling: Sampling, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """The target's tokens of a window, and how many drafts it accepts.

    Args:
      logits: [B,W,V]. drafts: [B,K] int32, K < W, -1 (never accepted) for none. keys: [B,W,2] of `position_keys`.
      sampling: parameters of the B rows.
      implementation: see `pallas_kernels.dispatch`. "tpu" reads the logits once and writes tokens only; thresholds and
        noise are found in vector memory. Compared with the reference and compiled for every TPU, but not timed. Sums
        over the vocabulary are added in another order: where a token's cumulative mass is within rounding of top_p,
        the two may draw the line at different tokens.

    Returns:
      tokens [B,W] int32 (those up to and including the first that differs from its draft are the window's) and the
      number of accepted drafts [B] int32.
    """
    implementations = {"reference": reference.verify, "tpu": _tpu}
    return dispatch.call("verification.verify", implementation, implementations, logits, drafts, keys, sampling)


def _tpu(*args: Any) -> tuple[Array, Array]:
    from pallas_kernels.verification import tpu  # Pallas takes a while to import

    return tpu.verify(*args)
