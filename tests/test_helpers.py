"""The comparison that every numerical test rests on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, relative_error


def test_relative_error_is_a_ratio_of_root_mean_squares() -> None:
    want = np.array([3.0, 4.0])
    assert relative_error(want + [0.3, -0.4], want) == pytest.approx(0.1)
    assert relative_error(jnp.float32([0.0, 2.0]), np.zeros(2)) == pytest.approx(2**0.5)


def test_bfloat16_is_compared_in_float64() -> None:
    assert relative_error(jnp.full((3,), 1.0078125, jnp.bfloat16), np.ones(3)) == pytest.approx(0.0078125)


@pytest.mark.parametrize("bad", [[1.0, np.nan], [1.0, np.inf], [1.0], [[1.0, 2.0]]], ids=str)
def test_nan_infinity_and_shape_never_pass(bad: list) -> None:
    with pytest.raises(AssertionError):
        relative_error(bad, np.array([1.0, 2.0]))
    with pytest.raises(AssertionError):
        relative_error(np.array([1.0, 2.0]), bad)


def test_equal_infinities_are_left_out() -> None:
    want = np.array([-np.inf, 2.0])
    assert relative_error(want, want) == 0.0
    assert relative_error(want[:1], want[:1]) == 0.0
    with pytest.raises(AssertionError, match="infinities differ"):
        relative_error(-want, want)


def test_assert_close_names_the_worst_element() -> None:
    with pytest.raises(AssertionError, match=r"logits: relative error .* worst at \(1, 0\): 9, expected 3"):
        assert_close([[1, 2], [9, 4]], [[1, 2], [3, 4]], name="logits")
    assert_close([1.0, 2.0], [1.0, 2.000001])


def test_strict_environment() -> None:
    assert jax.device_count() == 8
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
