"""Counters of speculation follow from the codes of the tokens that were kept."""

from __future__ import annotations

import pytest

from infer.outputs import CompletionOutput, RequestOutput, SpecMetrics


@pytest.mark.parametrize(
    ("codes", "drafts", "draft_tokens", "per_position"),
    [
        ([], 0, 0, (0, 0, 0)),
        ([-1], 0, 0, (0, 0, 0)),
        ([-1, 64], 1, 3, (0, 0, 0)),
        ([-1, 0, 1, 2, 67], 1, 3, (1, 1, 1)),
        ([-1, 0, 65, 64, 0, 1, 66], 3, 9, (2, 1, 0)),
        ([-1, 0, 65, 0], 2, 4, (2, 0, 0)),  # cut after one accepted draft: one draft put to the target
        ([-1, 0, 65, 0, 1, 2], 2, 6, (2, 1, 1)),
        ([0, 65], 1, 3, (1, 0, 0)),  # a continuation without its prefill token
    ],
)
def test_from_codes(codes: list[int], drafts: int, draft_tokens: int, per_position: tuple[int, ...]) -> None:
    got = SpecMetrics.from_codes(codes, 3)
    assert got == SpecMetrics(drafts, draft_tokens, sum(per_position), per_position)


def test_every_truncation_counts_only_what_is_kept() -> None:
    codes = [-1, 0, 1, 66, 64, 0, 1, 2, 67, 0, 65]
    for end in range(len(codes) + 1):
        got = SpecMetrics.from_codes(codes[:end], 3)
        assert got.num_accepted_tokens == sum(0 <= code < 64 for code in codes[:end])
        assert got.num_draft_tokens >= got.num_accepted_tokens and got.num_draft_tokens <= 3 * got.num_drafts


def test_without_drafts_nothing_is_counted() -> None:
    got = SpecMetrics.from_codes([-1, 64, 64], 0)
    assert got == SpecMetrics() and got.mean_acceptance_length == 1.0 and got.acceptance_rate_per_pos == ()


def test_figures() -> None:
    got = SpecMetrics.from_codes([-1, 0, 65, 0, 1, 2, 67], 3)
    assert got.mean_acceptance_length == 3.0
    assert got.acceptance_rate_per_pos == (1.0, 0.5, 0.5)


def test_sums_over_requests_and_continuations() -> None:
    completions = [CompletionOutput(i, "", [], "stop", codes=[-1, 0, 65]) for i in range(2)]
    outputs = [RequestOutput("0", None, [], completions, True), RequestOutput("1", None, [], completions[:1], True)]
    assert SpecMetrics.of(outputs, 2) == SpecMetrics(3, 6, 3, (3, 0))
    with pytest.raises(ValueError, match="different numbers of drafts: 2 and 3"):
        SpecMetrics.of(outputs, 2) + SpecMetrics.of(outputs, 3)


def test_metrics_have_vllms_names() -> None:
    metrics = {metric.name: metric for metric in SpecMetrics(3, 6, 3, (2, 1))}
    assert metrics["vllm:spec_decode_num_drafts"].value == 3
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == 6
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == 3
    assert metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values == (2, 1)
