"""How tests compare numbers: by one relative error in float64, never element by element, and never past a NaN."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PUBLISHED = "EAGLE3_TEST_DATA"
"""Names a folder of published files that this project does not ship: configs/*.json, templates/*.jinja."""


def published_folder() -> Path | None:
    """The folder, or None where there is none."""
    named = os.environ.get(PUBLISHED)
    return Path(named) if named and Path(named).is_dir() else None


def published(name: str) -> Path:
    """A file of that folder; skips the test where it is absent."""
    folder = published_folder()
    if folder is None or not (folder / name).is_file():
        pytest.skip(f"{name} is not shipped; set {PUBLISHED} to a folder that holds it")
    return folder / name


def as_float64(value: Any) -> np.ndarray:
    """`value` (numpy, jax, or a torch tensor on any device and dtype) as a float64 array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value).astype(np.float64)


def relative_error(got: Any, want: Any) -> float:
    """Root mean square of the difference over that of `want`; the plain RMS of `got` where `want` is zero throughout.

    Infinities must agree in place and sign (masked logits are -inf) and are then left out.
    Raises AssertionError if the shapes differ or either side holds a NaN.
    """
    got, want = as_float64(got), as_float64(want)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert not np.isnan(want).any(), f"the expected values hold {np.isnan(want).sum()} NaN of {want.size}"
    assert not np.isnan(got).any(), f"{np.isnan(got).sum()} NaN of {got.size}"
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite]) and np.isfinite(got[finite]).all(), "infinities differ"
    if not finite.any():
        return 0.0
    error, scale = _rms(got[finite] - want[finite]), _rms(want[finite])
    return error / scale if scale > 0 else error


def assert_close(got: Any, want: Any, rtol: float = 1e-5, name: str = "") -> None:
    """Assert that `relative_error(got, want) <= rtol`; the message names the worst element."""
    error = relative_error(got, want)
    if error > rtol:
        difference = np.abs(np.nan_to_num(as_float64(got) - as_float64(want), nan=0.0))
        worst = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
        label = f"{name}: " if name else ""
        raise AssertionError(
            f"{label}relative error {error:.3e} > {rtol:.1e}; worst at {worst}: "
            f"{as_float64(got)[worst]:.9g}, expected {as_float64(want)[worst]:.9g}"
        )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
