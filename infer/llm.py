"""`LLM`: vLLM's offline interface over the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jinja2 import TemplateError
from tqdm import tqdm

from eagle3_jax.checkpoint import load_drafter, load_target
from eagle3_jax.checkpoint.formats import read_head
from eagle3_jax.checkpoint.hf import read_config
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.distributed import check_all_take_part
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import UserError
from eagle3_jax.meshes import check_mesh
from eagle3_jax.target import Target
from infer.engine import Engine, EngineConfig
from infer.options import (
    DEFAULT_DRAFTER,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_MODEL,
    Drafting,
    Options,
    check_options,
    check_speculative_config,
    mesh_shape,
)
from infer.outputs import RequestOutput, SpecMetrics
from infer.params import SamplingParams
from infer.prompts import PreparedPrompt, Prompt, as_conversations, as_list, params_for_each, prepare
from infer.requests import Continuation, Request
from infer.sampling import request_key, request_state, resolve_stop_ids

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

# Names in generation_config.json and in SamplingParams; then what a model may recommend and we do not offer.
RECOMMENDED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    "max_new_tokens": "max_tokens",
}
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A target and, if asked for, its EAGLE-3 head, ready to continue prompts.

        llm = LLM(model="Qwen/Qwen3.5-9B", speculative_config={"model": "owner/head", "num_speculative_tokens": 3})
        for output in llm.generate(["The sea"], SamplingParams(temperature=0.8, max_tokens=100)):
            print(output.outputs[0].text)

    Keywords, as in vLLM:
      model                 folder or hub id; without one, the model in this repository with its head and K = 3
      speculative_config    {"model": head, "method": "eagle3", "num_speculative_tokens": K, and optionally
                            "draft_sample_method": "coupled" | "greedy" | "probabilistic",
                            "rejection_sample_method": "coupled" | "standard" | "synthetic",
                            "synthetic_acceptance_length": mean, "revision": ...}
      tensor_parallel_size  devices over which heads, features and vocabulary are spread
      mesh                  instead: devices along several axes, as "dp2 tp4" or "ep4 tp2" (see docs/scaling.md)
      max_model_len         longest prompt and continuation together (default: the model's, but no more than 4096)
      max_num_seqs          slots: prompts that are continued at the same time; more wait (default 16)
      dtype                 "auto" (the checkpoint's), "float32" or "bfloat16"
      quantization          the target's matrices in one byte: "int8", "fp8" or "fp8_per_block"; never the head's
      seed                  for requests without a seed of their own (default 0)
      revision, tokenizer, skip_tokenizer_init
      cycles_per_sync       cycles on the device between two looks of the host: how often `stream` has something new,
                            stop strings are seen and waiting prompts are let in (default 8)
      prefill_chunk         prompt tokens a pass (default 256)
      kernels               "auto" (those that were measured and won), "reference" (none), "gpu" or "tpu" (all of them;
                            where one cannot do its job a warning says why, and the reference does it)

    With the coupled rule (the default) a text is a function of weights, prompt, parameters and seed alone: the same
    with and without a head, for any K, alone or in a batch.

    Raises:
      UserError: an unknown keyword (vLLM's that mean nothing here are accepted with one warning), a value that is not
        allowed, a folder with something missing; it says which and what to do.
    """

    def __init__(self, model: str | Path | None = None, **keywords: Any) -> None:
        options = check_options(keywords)
        drafting = check_speculative_config(
            options.speculative_config, default_model=DEFAULT_DRAFTER if model is None else None
        )
        # Weights take minutes; whatever can be wrong without them is found before.
        folder = resolve(model or DEFAULT_MODEL, options.revision)
        config = read_config(read_json(folder, "config.json", required=True), folder)
        _max_model_len(options, config)
        head = None if drafting.model is None else read_head(drafting.model, config, revision=drafting.revision)
        mesh = _mesh(options, config, None if head is None else head.config)
        tokenizer = None if options.skip_tokenizer_init else _load_tokenizer(options.tokenizer or folder)
        target = load_target(folder, dtype=options.dtype, mesh=mesh, quantization=options.quantization)
        for note in (target.skipped, *target.notes):
            _say(note)
        drafter = _load_head(drafting, target.model, mesh) if drafting.model is not None else None
        if mesh is None:
            target.model.merge_projections()
        self._start(target.model, drafter, drafting, options, mesh)
        self._describe(tokenizer, target.stop_ids, target.generation_config)

    @classmethod
    def from_models(
        cls,
        target: Target,
        drafter: Eagle3 | None = None,
        *,
        tokenizer: Any = None,
        stop_ids: Sequence[int] = (),
        generation_config: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        **keywords: Any,
    ) -> LLM:
        """An LLM over models that are in memory already; other keywords as for `LLM`. Weights are shared.

        mesh: on which they lie, if it is not that of tensor_parallel_size.
        """
        llm = cls.__new__(cls)
        options = check_options(keywords)
        if drafter is None and options.speculative_config is not None:
            raise UserError("speculative_config: no drafter was given")
        if options.quantization is not None:
            raise UserError(
                "quantization: the target is loaded already; see load_target(quantization=), quantize_model"
            )
        here = Path("the drafter that was given")
        drafting = check_speculative_config(options.speculative_config, default_model=here if drafter else None)
        if mesh is None:
            mesh = _mesh(options, target.config, drafter.config if drafter is not None else None)
        llm._start(target, drafter, drafting, options, mesh)
        llm._describe(tokenizer, stop_ids, generation_config or {})
        return llm

    def _start(
        self, target: Target, drafter: Eagle3 | None, drafting: Drafting, options: Options, mesh: Mesh | None
    ) -> None:
        self.target, self.drafter, self.speculation = target, drafter, drafting.speculation
        self.max_model_len = _max_model_len(options, target.config)
        config = EngineConfig(
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_model_len,
            speculation=drafting.speculation,
            cycles_per_sync=options.cycles_per_sync,
            prefill_chunk=options.prefill_chunk,
            dtype=_dtype_of(target),
            kernels=None if options.kernels == "auto" else options.kernels,
        )
        self._engine = Engine(target, drafter, config, mesh=mesh)
        self._seed = options.seed
        self._num_requests = 0
        self._live: dict[tuple[int, int], tuple[Request, Continuation]] = {}
        self._metrics = SpecMetrics.from_codes((), self.num_speculative_tokens)

    def _describe(self, tokenizer: Any, stop_ids: Sequence[int], generation_config: Mapping[str, Any]) -> None:
        self._tokenizer, self.stop_ids = tokenizer, tuple(stop_ids)
        self._generation_config = dict(generation_config)
        for name, neutral in NEUTRAL.items():
            if self._generation_config.get(name) not in (None, neutral):
                value = self._generation_config[name]
                logger.warning("generation_config.json recommends %s=%s, which is not supported here", name, value)

    def replace_drafter(self, drafter: Eagle3) -> None:
        """Goes on with other weights of the same head, as training makes them. Raises ConfigError for another head."""
        self._engine.replace_drafter(drafter)
        self.drafter = drafter

    @property
    def mesh(self) -> Mesh | None:
        """Over which the weights are spread, None on one device."""
        return self._engine.mesh

    @property
    def num_speculative_tokens(self) -> int:
        """K, 0 without a head."""
        return self.speculation.num_drafts

    @property
    def dtype(self) -> str:
        """What the target computes in: "float32" or "bfloat16"."""
        return str(_dtype_of(self.target))

    def prefill_chunks(self, num_tokens: int) -> list[int]:
        """Lengths of the passes that take in a prompt: a program is compiled for each length that occurs."""
        return self._engine.prefill_chunks(num_tokens)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises UserError when none was loaded."""
        if self._tokenizer is None:
            raise UserError("no tokenizer was loaded (skip_tokenizer_init)")
        return self._tokenizer

    def get_metrics(self) -> SpecMetrics:
        """Counters of speculation over everything this LLM has finished; iterating gives vLLM's metrics."""
        return self._metrics

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, for `generate` without sampling parameters."""
        found = {name: self._generation_config.get(theirs) for theirs, name in RECOMMENDED.items()}
        return SamplingParams(**{name: value for name, value in found.items() if value is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; outputs in the order of the prompts.

        prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, a list of ids, or a list of these.
        sampling_params: one for all, or one for each prompt.
        Raises UserError for a prompt that is empty, too long or outside the vocabulary, by its index, before any work.
        """
        return self._generate(self._prepare(as_list(prompts)), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them. `template`: see `render`."""
        return self._generate(self._prepare_chat(messages, template), sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output (all of it so far) whenever it has grown.

        Prompts are checked at once, not at the first `next`. Closing the iterator ends what is still running.
        """
        return self._stream(self._prepare(as_list(prompts)), sampling_params)

    def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]:
        """Like `chat`, but yields outputs as they grow."""
        return self._stream(self._prepare_chat(messages, template), sampling_params)

    def render(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text that the model continues.

        chat_template_kwargs: what the template itself understands, such as {"enable_thinking": False}.
        """
        tokenizer = self.get_tokenizer()
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise UserError("chat: the model's tokenizer has no chat template; use generate(), or give chat_template")
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        except (TemplateError, TypeError, ValueError) as error:  # whatever a template does with what it did not expect
            raise UserError(f"chat: the template cannot render this conversation: {error}") from error

    # ---------------------------------------------------------------------------------------------- inside

    def _prepare(self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True) -> list[PreparedPrompt]:
        return prepare(
            prompts,
            self._tokenizer,
            vocab_size=self.target.config.vocab_size,
            max_model_len=self.max_model_len,
            add_special_tokens=add_special_tokens,
        )

    def _prepare_chat(self, messages: Any, template: Mapping[str, Any]) -> list[PreparedPrompt]:
        conversations = as_conversations(messages)
        # The template writes the special tokens; the tokenizer must not add a second beginning.
        return self._prepare([self.render(one, **template) for one in conversations], add_special_tokens=False)

    def _generate(self, prompts: list[PreparedPrompt], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        requests = self._requests_for(prompts, params)
        bar = tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True)
        with bar:
            for changed in self._run(requests):
                bar.update(sum(request.finished for request in changed))
        return [request.output() for request in requests]

    def _stream(self, prompts: list[PreparedPrompt], params: Any) -> Iterator[RequestOutput]:
        requests = self._requests_for(prompts, params)
        return (request.output() for changed in self._run(requests) for request in changed)

    def _requests_for(self, prompts: list[PreparedPrompt], params: Any) -> list[Request]:
        """A request for each prompt, after all sampling parameters have been found good."""
        each = params_for_each(params, len(prompts), self.get_default_sampling_params())
        for index, one in enumerate(each):
            self._check_params(one, index)
        first = self._num_requests
        self._num_requests += len(prompts)
        return [
            Request(first + i, prompt, one, self._tokenizer)
            for i, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]

    def _submit(self, request: Request) -> None:
        """Queues the continuations of a request."""
        params, ids = request.params, request.prompt.token_ids
        for sample, continuation in enumerate(request.continuations):
            key = request_key(
                engine_seed=self._seed, request_index=request.number, seed=params.seed, sample_index=sample
            )
            row = request_state(params, prompt_length=len(ids), model_stop_ids=self.stop_ids, key=key)
            self._live[request.number, sample] = request, continuation
            self._engine.submit((request.number, sample), ids, row, params.max_tokens)

    def _check_params(self, params: SamplingParams, index: int) -> None:
        if params.stop and self._tokenizer is None:
            raise UserError(f"sampling_params {index}: stop strings need a tokenizer (skip_tokenizer_init)")
        vocab_size = self.target.config.vocab_size
        if outside := [i for i in params.stop_token_ids or () if i >= vocab_size]:
            raise UserError(
                f"sampling_params {index}: stop_token_ids: {outside[0]} is outside the vocabulary (0..{vocab_size - 1})"
            )
        resolve_stop_ids(params, self.stop_ids)

    def _run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Steps the engine until `requests` are finished; yields those that changed, in order, at every step."""
        try:
            for request in requests:
                self._submit(request)
            left = requests  # whose end has not been told; a step taken for somebody else's requests may end ours
            while left:
                if not any(request.changed for request in left):
                    self._step()
                changed = [request for request in left if request.changed]
                for request in changed:
                    request.changed = False
                left = [request for request in left if not request.finished]
                yield changed
        finally:
            for request in requests:
                self._forget(request)

    def _step(self) -> None:
        """One step of the engine; its updates go to whomever they belong to (several streams share an engine)."""
        for update in self._engine.step():
            request, continuation = self._live[update.request_id]
            must_abort = continuation.take(update)
            request.changed = request.changed or bool(update.token_ids) or continuation.finished
            if must_abort:
                self._engine.abort(update.request_id)
            if continuation.finished:
                del self._live[update.request_id]
                self._metrics += continuation.metrics(self.num_speculative_tokens)

    def _forget(self, request: Request) -> None:
        """Ends what is still running of a request whose caller has gone."""
        for sample in range(request.params.n):
            if self._live.pop((request.number, sample), None) is not None:
                self._engine.abort((request.number, sample))


def _mesh(options: Options, target: TargetConfig, draft: DraftConfig | None) -> Mesh | None:
    shape = mesh_shape(options)
    check_mesh(shape, jax.device_count(), target, draft)
    mesh = shape.mesh() if shape.size > 1 else None
    check_all_take_part(mesh, "tensor_parallel_size" if options.mesh is None else "mesh")
    return mesh


def _dtype_of(target: Target) -> Any:
    return target.embed_tokens.weight[...].dtype


def _max_model_len(options: Options, config: TargetConfig) -> int:
    limit = config.max_position_embeddings
    if options.max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if options.max_model_len > limit:
        raise UserError(f"LLM: max_model_len={options.max_model_len} is more than the model's {limit}")
    return options.max_model_len


def _load_head(drafting: Drafting, target: Target, mesh: Mesh | None) -> Eagle3:
    assert drafting.model is not None
    head = load_drafter(
        drafting.model,
        target.config,
        dtype=_dtype_of(target),
        revision=drafting.revision,
        mesh=mesh,
        embed=target.embed_tokens.weight[...],
    )
    for note in head.notes:
        _say(note)
    return head.model


def _load_tokenizer(folder: str | Path) -> Any:
    from transformers import AutoTokenizer  # seconds to import, and not needed with skip_tokenizer_init

    try:
        # transformers makes an empty tokenizer of a folder that has only a config.json.
        if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise OSError(f"none of {', '.join(TOKENIZER_FILES)} is there")
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"no tokenizer could be read from {folder}: {first}; name another with tokenizer=, or work with token ids "
            "and skip_tokenizer_init=True"
        ) from error


def _say(note: str) -> None:
    if note:
        logger.info("%s", note)
