"""The public class over a real engine with random weights: what vLLM's user expects, and the promises of coupling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle3_jax.errors import UserError
from infer import LLM, SamplingParams
from infer.outputs import SpecMetrics
from pallas_kernels import dispatch
from tests.infer.models import DRAFT, STOP_ID, TARGET, TOKENIZER, make_drafter, make_target

PROMPTS = ["the cat", "h", "hello world, stop here and there " * 3, "日本語"]
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=40)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"target": make_target(), "drafter": make_drafter()}


def build(models: dict[str, Any], **keywords: Any) -> LLM:
    keywords = {"max_num_seqs": 4, "max_model_len": 128, "cycles_per_sync": 3, **keywords}
    return LLM.from_models(tokenizer=TOKENIZER, stop_ids=[STOP_ID], **models, **keywords)


@pytest.fixture(scope="module")
def llm(models: dict[str, Any]) -> LLM:
    return build(models)


@pytest.fixture(scope="module")
def plain(models: dict[str, Any]) -> LLM:
    return build({"target": models["target"]})


def ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, prompts: Any, params: Any = SEEDED) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_outputs_as_in_vllm(llm: LLM) -> None:
    outputs = generate(llm, PROMPTS)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_token_ids == TOKENIZER.encode(prompt) and output.finished
        (one,) = output.outputs
        assert one.index == 0 and one.finish_reason in ("stop", "length") and len(one.token_ids) <= 40
        assert one.text == TOKENIZER.decode(one.token_ids, skip_special_tokens=True)
        assert len(one.codes) == len(one.token_ids)
    assert len({output.request_id for output in outputs}) == 4


def test_the_drafter_never_changes_a_seeded_text(llm: LLM, plain: LLM) -> None:
    before = llm.get_metrics().num_accepted_tokens
    assert ids(generate(llm, PROMPTS)) == ids(generate(plain, PROMPTS))
    assert llm.get_metrics().num_accepted_tokens > before + 10, "nothing was accepted, so nothing was shown"
    assert plain.get_metrics() == SpecMetrics()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"top_k": 20, "min_p": 0.01, "seed": 2},
        {"seed": 4, "min_tokens": 20},
    ],
    ids=str,
)
def test_nor_with_filters(llm: LLM, plain: LLM, params: dict[str, Any]) -> None:
    request = SamplingParams(max_tokens=25, **params)
    assert ids(generate(llm, PROMPTS[:2], request)) == ids(generate(plain, PROMPTS[:2], request))


def test_alone_or_in_a_batch_with_others(llm: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=10 + 5 * i, temperature=0.5 * i) for i in range(4)]
    together = ids(generate(llm, PROMPTS, params))
    assert together == [ids(generate(llm, PROMPTS[i], params[i]))[0] for i in range(4)]


def test_a_broken_neighbour_leaves_nothing_behind() -> None:
    """A token whose embedding is NaN: the next request in its slot sees none of it, in the target or in the head."""
    target = make_target(tie_word_embeddings=False)
    target.embed_tokens.weight[...] = target.embed_tokens.weight[...].at[7].set(np.nan)
    llm = build({"target": target, "drafter": make_drafter()}, max_num_seqs=1)
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [1, 7, 3, 4, 5, 6, 7, 8]}]
    before, _, after = generate(llm, [prompts[0], prompts[1], prompts[0]])
    assert before.outputs[0] == after.outputs[0]


def test_more_prompts_than_slots(llm: LLM) -> None:
    prompts = [f"hello {i}" for i in range(11)]
    many = generate(llm, prompts)
    assert [output.prompt for output in many] == prompts
    assert ids(many)[7] == ids(generate(llm, prompts[7]))[0]


def test_unseeded_requests_follow_the_engines_seed(models: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=12)
    plain = {"target": models["target"]}
    first, again, other = (build(plain, seed=seed) for seed in (1, 1, 2))
    one, two = generate(first, PROMPTS[0], params), generate(first, PROMPTS[0], params)
    assert ids(one) != ids(two), "the second request is another request"
    assert ids(one) == ids(generate(again, PROMPTS[0], params)) != ids(generate(other, PROMPTS[0], params))


def test_n_continuations_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    (output,) = generate(llm, PROMPTS[0], params)
    texts = [one.token_ids for one in output.outputs]
    assert [one.index for one in output.outputs] == [0, 1, 2] and len(set(map(tuple, texts))) == 3
    assert texts[0] == ids(generate(llm, PROMPTS[0], SamplingParams(seed=5, max_tokens=8)))[0]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7])
def test_max_tokens_inside_the_window(llm: LLM, max_tokens: int) -> None:
    (output,) = generate(llm, PROMPTS[0], SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True))
    whole = generate(llm, PROMPTS[0], SamplingParams(seed=3, max_tokens=40, ignore_eos=True))
    assert output.outputs[0].token_ids == ids(whole)[0][:max_tokens]
    assert output.outputs[0].finish_reason == "length"


def test_the_context_is_a_limit(llm: LLM) -> None:
    request = SamplingParams(seed=3, max_tokens=None, ignore_eos=True)
    (output,) = generate(llm, {"prompt_token_ids": [5] * 110}, request)
    assert len(output.outputs[0].token_ids) == 18 and output.outputs[0].finish_reason == "length"
    assert output.prompt is None


def test_stop_token_inside_the_window(llm: LLM) -> None:
    whole = ids(generate(llm, PROMPTS[0], SamplingParams(seed=3, max_tokens=40, ignore_eos=True)))[0]
    for at in (0, 1, 5, 6, 7, 8, 20):
        stop = whole[at]
        end = whole.index(stop) + 1
        (output,) = generate(
            llm, PROMPTS[0], SamplingParams(seed=3, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
        )
        one = output.outputs[0]
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (whole[:end], "stop", stop)
        assert one.text == TOKENIZER.decode(whole[: end - 1], skip_special_tokens=True)
        assert len(one.codes) == end


def test_stop_string_truncates_text_tokens_and_counters(models: dict[str, Any]) -> None:
    llm = build(models)
    request = {"seed": 3, "max_tokens": 40, "ignore_eos": True}
    whole = generate(llm, PROMPTS[0], SamplingParams(**request))[0].outputs[0]
    # Half characters wait for their rest, so take a stop string without any.
    stop = next(whole.text[i : i + 3] for i in range(4, 60) if whole.text[i : i + 3].isascii())
    start = whole.text.index(stop)
    before = llm.get_metrics()
    one = generate(llm, PROMPTS[0], SamplingParams(stop=stop, **request))[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == (whole.text[:start], "stop", stop)
    assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert stop in decode(one.token_ids) and stop not in decode(one.token_ids[:-1])
    assert before + SpecMetrics.from_codes(one.codes, 3) == llm.get_metrics()
    after = generate(llm, PROMPTS[0], SamplingParams(**request))[0].outputs[0]
    assert after.token_ids == whole.token_ids, "the slot is as good as new"


def test_the_standard_rule_runs(models: dict[str, Any]) -> None:
    config = {"num_speculative_tokens": 3, "rejection_sample_method": "standard"}
    llm = build(models, speculative_config=config)
    assert llm.speculation.draft_sample_method == "probabilistic"
    assert all(ids(generate(llm, PROMPTS))) and llm.get_metrics().num_accepted_tokens > 10
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    assert ids(generate(llm, PROMPTS[:1], greedy)) == ids(generate(build(models), PROMPTS[:1], greedy))


def test_stream_grows_to_what_generate_returns(llm: LLM) -> None:
    final, updates = {}, 0
    for output in llm.stream(PROMPTS, SEEDED):
        last = final.get(output.request_id)
        assert last is None or (not last.finished and output.outputs[0].text.startswith(last.outputs[0].text))
        final[output.request_id], updates = output, updates + 1
    assert updates > 8 and all(output.finished for output in final.values())
    got = sorted(final.values(), key=lambda output: int(output.request_id))
    assert [output.outputs[0] for output in got] == [output.outputs[0] for output in generate(llm, PROMPTS)]


def test_streams_share_an_engine_and_may_be_left(llm: LLM) -> None:
    want = ids(generate(llm, PROMPTS[:2]))
    one, two = llm.stream(PROMPTS[0], SEEDED), llm.stream(PROMPTS[1], SEEDED)
    left = llm.stream(PROMPTS[2], SEEDED)
    next(one), next(left), next(two)
    left.close()
    assert [list(two)[-1].outputs[0].token_ids, list(one)[-1].outputs[0].token_ids] == want[::-1]
    assert not llm._live and not llm._engine.has_work
    llm.stream(PROMPTS[0], SEEDED)  # never looked at: never started
    assert not llm._engine.has_work


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = llm.render(messages, chat_template_kwargs={"enable_thinking": True})
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>"
    (output,) = llm.chat(messages, SEEDED, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
    assert output.prompt == text and output.prompt_token_ids == TOKENIZER.encode(text)
    many = llm.chat([messages, messages], SEEDED, use_tqdm=False, add_generation_prompt=False)
    assert [one.prompt for one in many] == ["<|im_start|>user\nhello<|im_end|>\n"] * 2
    assert list(llm.stream_chat(messages, SEEDED))[-1].outputs[0] == llm.chat(messages, SEEDED)[0].outputs[0]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "chat: expected a list of messages, found 'hello'"),
        ([{"role": "user", "content": "a"}, "b"], "conversation 0: a message needs a role and content, found 'b'"),
        ([{"content": "a"}], "conversation 0: a message needs a role"),
        ([[{"role": "user", "content": "a"}], []], "conversation 1: expected a list of messages, found []"),
    ],
)
def test_bad_conversations_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        llm.chat(messages, SEEDED)
    assert message in str(error.value)


@pytest.mark.parametrize("template", ["{{ raise_exception('system first') }}", "{{ 'a' + messages }}", "{% if %}"])
def test_what_a_template_cannot_render_is_refused(llm: LLM, template: str) -> None:
    with pytest.raises(UserError, match="chat: the template cannot render this conversation: ."):
        llm.chat([{"role": "user", "content": "a"}], SEEDED, chat_template=template)


def test_default_sampling_params_come_from_the_model(models: dict[str, Any]) -> None:
    llm = build({"target": models["target"]}, generation_config={"temperature": 0.6, "top_k": 20, "bos_token_id": 1})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    assert len(ids(llm.generate("the", use_tqdm=False))[0]) <= 16


def test_what_the_model_recommends_and_we_cannot_do_is_said(
    models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = {"temperature": 0.7, "max_new_tokens": 9, "repetition_penalty": 1.05, "presence_penalty": 0.0}
    llm = build({"target": models["target"]}, generation_config=config)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, max_tokens=9)
    assert [record.getMessage() for record in caplog.records if record.name == "infer.llm"] == [
        "generation_config.json recommends repetition_penalty=1.05, which is not supported here"
    ]


def test_every_form_of_prompt(llm: LLM) -> None:
    tokens = TOKENIZER.encode("the cat")
    forms: list[Any] = ["the cat", {"prompt": "the cat"}, {"prompt_token_ids": tokens}, tokens, np.array(tokens)]
    want = ids(generate(llm, "the cat"))[0]
    for form in forms:
        assert ids(generate(llm, form))[0] == want
    assert ids(generate(llm, forms[:4])) == [want] * 4
    assert generate(llm, []) == []


BAD_PROMPTS: list[tuple[Any, str]] = [
    (["fine", ""], "prompt 1: is empty"),
    (["fine", {"prompt_token_ids": []}], "prompt 1: is empty"),
    ([[1, 2], [3, TARGET.vocab_size]], f"prompt 1: token id {TARGET.vocab_size} is outside the vocabulary"),
    ([[1, -2]], "prompt 0: token id -2 is outside"),
    (["fine", [1] * 128], "prompt 1: has 128 tokens, which leaves no room for a new one in max_model_len=128"),
    (["fine", {"prompt": "x", "multi_modal_data": {}}], "prompt 1: multi_modal_data not understood"),
    ([{}], "prompt 0: needs 'prompt' or 'prompt_token_ids'"),
    ([3.5], "prompt 0: expected text or a list of token ids, found 3.5"),
    ([["a", "b"]], "prompt 0: expected text or a list of token ids"),
    ([{"prompt_token_ids": "abc"}], "prompt 0: expected text or a list of token ids, found 'abc'"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused_by_index_before_any_work(llm: LLM, prompts: Any, message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(UserError) as error:
            call(prompts, SEEDED)
        assert message in str(error.value)
        assert not llm._live and not llm._engine.has_work


def test_bad_sampling_params_are_refused(llm: LLM, models: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="sampling_params: 3 given for 2 prompts"):
        llm.generate(PROMPTS[:2], [SEEDED] * 3)
    with pytest.raises(UserError, match="sampling_params 1: expected SamplingParams, found dict"):
        llm.generate(PROMPTS[:2], [SEEDED, {"temperature": 0}])  # type: ignore[list-item]
    with pytest.raises(UserError, match="sampling_params: expected SamplingParams or a list of them, found dict"):
        llm.generate(PROMPTS[:2], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="prompts: expected text, token ids or a list of these, found NoneType"):
        llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="sampling_params 0: stop_token_ids: 9999 is outside the vocabulary"):
        llm.generate(PROMPTS[0], SamplingParams(stop_token_ids=[9999]))


def test_without_a_tokenizer(models: dict[str, Any]) -> None:
    llm = LLM.from_models(models["target"], max_num_seqs=4, max_model_len=128, cycles_per_sync=3)
    (output,) = generate(llm, [1, 2, 3], SamplingParams(max_tokens=4))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4
    with pytest.raises(UserError, match="prompt 0: is text, and no tokenizer was loaded"):
        llm.generate("text")
    with pytest.raises(UserError, match="sampling_params 0: stop strings need a tokenizer"):
        llm.generate([1, 2], SamplingParams(stop="x"))
    with pytest.raises(UserError, match="no tokenizer was loaded"):
        llm.get_tokenizer()


def test_context_beyond_the_model_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="max_model_len=257 is more than the model's 256"):
        build({"target": models["target"]}, max_model_len=257)
    assert DRAFT.vocab_size == TARGET.vocab_size


def test_kernels_that_cannot_run_here_give_way(models: dict[str, Any], llm: LLM) -> None:
    dispatch._fallbacks.clear()
    forced = build(models, kernels="gpu")
    assert ids(generate(forced, PROMPTS[:1])) == ids(generate(llm, PROMPTS[:1]))
    assert "for GPUs" in dispatch.fallbacks()["attention.paged_attention"]
