"""Evaluation on held-out prompts: what the engine accepts of the head as it is, beside what training predicts.

The engine answers each prompt greedily with the head drafting, and counts; then `train.evaluate` predicts those counts
from the same text by teacher forcing. In float32 both are equal. In bfloat16 a few positions are rounded differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.evaluate import Acceptance, Answer, count_acceptance, greedy_answers, make_matches
from train.recipe import EvalRecipe, RecipeError
from train.step import Frozen, Model, TrainState

SLOTS = 16


class HeldOut:
    """Evaluates one run's head whenever it is called.

    Programs are compiled at the first call; the engine, with its slots' caches, stays on the device from then on.
    Target weights are those that training uses.
    """

    def __init__(
        self, recipe: EvalRecipe, answers: Sequence[Answer], model: Model, frozen: Frozen, d2t: np.ndarray, *,
        stop_ids: Sequence[int], mesh: Mesh | None = None,
    ) -> None:  # fmt: skip
        self._recipe, self._model, self._frozen, self._mesh = recipe, model, frozen, mesh
        self._stop_ids = tuple(stop_ids)
        target = model.target(frozen)
        room = target.config.max_position_embeddings
        self._prompts = [a.tokens[: a.prompt_length].tolist() for a in answers if a.prompt_length < room]
        if not self._prompts:
            raise RecipeError(f"evaluate.files: no prompt is shorter than the target's context of {room} tokens")
        self._room = min(room, max(map(len, self._prompts)) + recipe.max_tokens)
        self._matches = make_matches(dataclasses.replace(model, num_steps=recipe.num_drafts), jnp.asarray(d2t))
        self._llm: Any = None

    def __call__(self, state: TrainState) -> dict[str, Any]:
        """Acceptance of greedy drafts, {"predicted": ..., "measured": ..., ...}, as it goes into metrics.jsonl."""
        llm = self._engine(state)
        before = Acceptance.counted(llm.get_metrics())
        answers = greedy_answers(llm, self._prompts, self._recipe.max_tokens)
        after, count = Acceptance.counted(llm.get_metrics()), self._recipe.num_drafts
        predicted = count_acceptance(self._matches, state.params, self._frozen, answers, count, SLOTS)
        return {
            "num_drafts": count,
            "num_prompts": len(answers),
            "num_tokens": sum(len(a.tokens) - a.prompt_length for a in answers),
            "predicted": predicted.as_dict(),
            "measured": (after - before).as_dict(),
        }

    def _engine(self, state: TrainState) -> Any:
        """The `infer.LLM` with the head of `state`, in the dtype of training."""
        from infer import LLM

        head = self._model.draft.merge(state.params, self._frozen.fixed, self._model.dtype)
        if self._llm is None:
            self._llm = LLM.from_models(
                self._model.target(self._frozen), head, stop_ids=self._stop_ids, mesh=self._mesh,
                max_num_seqs=min(SLOTS, len(self._prompts)), max_model_len=self._room,
                speculative_config={"num_speculative_tokens": self._recipe.num_drafts},
            )  # fmt: skip
        else:
            self._llm.replace_drafter(head)
        return self._llm
