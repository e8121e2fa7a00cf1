"""A whole run: recipe in, head out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from eagle3_jax.checkpoint import load_target, save_specforge
from eagle3_jax.checkpoint.hf import read_config
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.checkpoint.stop_ids import stop_ids
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.distributed import check_all_take_part, is_first, to_host
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import UserError
from eagle3_jax.meshes import MeshShape, check_mesh
from eagle3_jax.precision import parse_dtype
from eagle3_jax.target import Target
from train.checkpoints import Checkpoints, describe_run
from train.data.batches import Batches, DataReport, bucket_lengths, load_rows
from train.data.checksums import check_prepared
from train.data.conversations import Row
from train.data.inputs import check_inputs
from train.data.mask import ChatRenderer
from train.data.packing import filled, pack_rows
from train.data.renderer import load_renderer
from train.data.shards import ShardFolder, disk_errors
from train.data.stored import check_head, load_ends, open_stored, stored_rows
from train.data.vocab import count_supervised, coverage
from train.evaluate import Answer, answers_of
from train.flops import Work, flops_per_token, mean_visible, total_peak
from train.head import check_exportable, draft_config, draft_vocab, existing_head, new_head, planned_config
from train.held_out import HeldOut
from train.layout import optimizer_shardings
from train.loop import Loop
from train.metrics import read_metrics
from train.objective import Objective
from train.optim import learning_rate, make_optimizer
from train.plot import plot_acceptance
from train.progress import Progress
from train.recipe import Recipe, RecipeError, flatten, to_yaml
from train.rows import own_rows
from train.scalars import check_scalars, open_scalars
from train.step import Frozen, Model, TrainState, batch_sharding, make_model, make_step


@dataclasses.dataclass(frozen=True)
class Data:
    """Training sequences, what became of the files, and how often the assistant says each token [V].

    filled: of packed sequences, the share of their places that hold a token.
    """

    rows: list[Row]
    report: DataReport
    counts: np.ndarray
    filled: float | None = None


def train(recipe: Recipe, *, quiet: bool = False) -> int:
    """Trains, resuming if the output folder holds checkpoints of the same recipe. Returns the exit status.

    Raises:
      UserError: the recipe, data, target or output folder cannot be used.
      TrainingError: the loss stopped being finite.
    """
    check_inputs(recipe)
    check_scalars(recipe.log)
    folder = resolve(recipe.target)
    config = read_config(read_json(folder, "config.json", required=True), folder)
    planned = planned_config(recipe.draft, config)
    if recipe.export:
        check_exportable(planned)
    say = (lambda *_: None) if quiet else tqdm.write
    answers = read_answers(recipe, folder, config)
    stored = open_stored(recipe, folder) if recipe.features else None
    if stored:
        check_head(recipe, stored, planned)
    data = read_stored(stored, config) if stored else read_data(recipe, folder, config, quiet=quiet)
    say(str(data.report))
    if recipe.data.packing:
        data = packed(data, recipe)
        say(f"packed into {len(data.rows)} sequences of {recipe.data.max_length} tokens, {data.filled:.1%} filled")
    mesh = _mesh(recipe, config, planned)
    dtype = parse_dtype(recipe.dtype)
    target = load_ends(folder, config, dtype, mesh) if stored else load_target(folder, dtype=dtype, mesh=mesh).model
    head, notes = _head(recipe, data, target, mesh)
    for note in notes:
        say(note)
    run = _Run(recipe, data, answers, target, head, mesh)
    return run.go(quiet=quiet)


def read_data(recipe: Recipe, folder: Path, config: TargetConfig, *, quiet: bool) -> Data:
    """Reads, masks and counts the recipe's files."""
    d = recipe.data
    wrap: Any = iter if quiet else partial(_watch, text="reading")
    renderer = _renderer(recipe, folder)
    check_prepared(d.files, renderer)
    rows, report = load_rows(
        d.files, renderer, max_length=d.max_length, overlong=d.overlong,
        vocab_size=config.vocab_size, wrap=wrap,
    )  # fmt: skip
    return Data(rows, report, count_supervised(rows, config.vocab_size))


def read_stored(stored: ShardFolder, config: TargetConfig) -> Data:
    """The rows whose features are stored; all were found usable when they were prepared."""
    rows = list(stored_rows(stored))
    supervised = sum(shard["supervised_tokens"] for shard in stored.shards)
    report = DataReport(len(rows), len(rows), stored.num_tokens, supervised)
    return Data(rows, report, count_supervised(rows, config.vocab_size))


def packed(data: Data, recipe: Recipe) -> Data:
    """The same rows in fewer sequences."""
    length = recipe.data.max_length
    rows = pack_rows(data.rows, length, recipe.seed)
    return dataclasses.replace(data, rows=rows, filled=filled(rows, length))


def read_answers(recipe: Recipe, folder: Path, config: TargetConfig) -> list[Answer]:
    """The held-out answers, if any are asked for. They are read before training, so that nothing is amiss after it."""
    e = recipe.evaluate
    if not e.files:
        return []
    held_out = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, files=e.files))
    try:
        answers = answers_of(read_data(held_out, folder, config, quiet=True).rows[: e.max_rows])
    except UserError as error:
        raise RecipeError(f"evaluate.files: {error}") from error
    if not answers:
        raise RecipeError("evaluate.files: no row has an answer after a prompt")
    return answers


def _watch(records: Iterable[Any], text: str) -> Iterable[Any]:
    return tqdm(records, desc=text, unit="row", dynamic_ncols=True)


def _renderer(recipe: Recipe, folder: Path) -> ChatRenderer | None:
    """None if the target comes without a tokenizer: then rows must be tokenised."""
    d = recipe.data
    return load_renderer(
        folder, tokenizer=d.tokenizer, template_kwargs=d.template_kwargs, changed_turns=d.changed_turns
    )


def _mesh(recipe: Recipe, target: TargetConfig, draft: DraftConfig | None) -> Mesh | None:
    shape = MeshShape(**dataclasses.asdict(recipe.mesh))
    check_mesh(shape, jax.device_count(), target, draft)
    mesh = shape.mesh() if shape.size > 1 else None
    check_all_take_part(mesh, "mesh")
    return mesh


def _head(recipe: Recipe, data: Data, target: Target, mesh: Mesh | None) -> tuple[Eagle3, tuple[str, ...]]:
    draft = recipe.draft
    if draft.init_from is not None:
        return existing_head(draft.init_from, target, mesh)
    config = draft_config(draft, target.config)
    d2t = draft_vocab(draft, data.counts, config.draft_vocab_size)
    return new_head(config, d2t, target, seed=recipe.seed, init_head=draft.init_head), ()


class _Run:
    """Everything in place for the loop."""

    def __init__(
        self, recipe: Recipe, data: Data, answers: list[Answer], target: Target, head: Eagle3, mesh: Mesh | None
    ) -> None:
        self.recipe, self.data, self.head, self.mesh, self.target_config = recipe, data, head, mesh, target.config
        self.output = Path(recipe.output)
        self.d2t = np.asarray(head.d2t[...])
        self.num_steps = recipe.num_steps(len(data.rows))
        self.optimizer = make_optimizer(recipe.optimizer, self.num_steps)
        self.model, params, self.frozen = self._model(target)
        self.num_parameters = sum(x.size for x in params.values())
        where = None if mesh is None else optimizer_shardings(self.optimizer, params, mesh)
        self.state = TrainState(params, jax.jit(self.optimizer.init, out_shardings=where)(params))
        self.held_out = self._held_out(answers) if answers else None

    def _held_out(self, answers: list[Answer]) -> HeldOut:
        stops, _ = stop_ids(resolve(self.recipe.target))
        return HeldOut(self.recipe.evaluate, answers, self.model, self.frozen, self.d2t, stop_ids=stops, mesh=self.mesh)

    def _model(self, target: Target) -> tuple[Model, dict[str, Any], Frozen]:
        r = self.recipe
        dtype = parse_dtype(r.dtype)
        return make_model(
            target, self.head, num_steps=r.ttt_steps, decay=r.decay, dtype=dtype, remat=r.remat,
            objective=Objective(r.loss, r.kl_scale, r.kl_decay, r.hidden_weight), mesh=self.mesh,
        )  # fmt: skip

    def go(self, *, quiet: bool) -> int:
        """Restores, trains, exports. Returns 0, or 128 + the signal that ended it early."""
        r = self.recipe
        described = describe_run(r, self.num_steps, self.data.rows, self.head.config)
        with Checkpoints(self.output, r.keep, described, r.checkpoints) as checkpoints, disk_errors(self.output):
            start = checkpoints.latest() or 0
            if start:
                self.state = checkpoints.restore(start, self.state, self.d2t)
            if is_first():
                (self.output / "recipe.yaml").write_text(to_yaml(r), encoding="utf-8")
            begun = time.monotonic()
            with self._progress(start, quiet) as progress:
                state, done, signal = self._loop(checkpoints, progress).run(self.state, start, self.num_steps)
                checkpoints.wait()
                if signal is not None and done < self.num_steps:
                    return 128 + signal
                self._finish(state, time.monotonic() - begun, done - start, progress)
            if is_first():
                plot_acceptance(self.output, (lambda _: None) if quiet else tqdm.write)
        return 0

    def _progress(self, start: int, quiet: bool) -> contextlib.closing[Progress]:
        r = self.recipe
        devices = jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)
        flops = flops_per_token(
            self.target_config, self.head.config, r.ttt_steps, mean_visible(self.data.rows), offline=bool(r.features)
        )
        progress = Progress(
            self.output / "metrics.jsonl" if is_first() else Path(os.devnull), start=start, total=self.num_steps,
            every=r.log_every, quiet=quiet, work=Work(flops, total_peak(devices, r.peak_flops)),
            scalars=open_scalars(r, start) if is_first() else (),
        )  # fmt: skip
        return contextlib.closing(progress)

    def _loop(self, checkpoints: Checkpoints, progress: Progress) -> Loop:
        r = self.recipe
        batches = Batches(
            self.data.rows,
            batch_size=r.batch_size,
            seed=r.seed,
            buckets=bucket_lengths(r.data.max_length, r.data.buckets),
            part=own_rows(r.batch_size, batch_sharding(self.mesh)) if self.mesh and jax.process_count() > 1 else None,
        )
        return Loop(
            step=make_step(self.model, self.optimizer, parts=r.accumulate, state=self.state), frozen=self.frozen,
            batches=batches,
            save=lambda done, state: checkpoints.save(done, state, self.d2t), progress=progress,
            rate=learning_rate(r.optimizer, self.num_steps), output=self.output, save_every=r.save_every,
            mesh=self.mesh, evaluate=partial(self._evaluate, progress) if self.held_out else None,
            evaluate_every=r.evaluate.every,
        )  # fmt: skip

    def _finish(self, state: TrainState, seconds: float, steps: int, progress: Progress) -> None:
        if self.recipe.export:
            params = to_host(state.params) if jax.process_count() > 1 else state.params
            if is_first():
                head = self.model.draft.merge(params, to_host(self.frozen.fixed), jnp.float32)
                save_specforge(head, self.head.config, self.output / "head", dtype=parse_dtype(self.recipe.dtype))
        evaluation = {"evaluation": self._evaluate(progress, self.num_steps, state)} if self.held_out else {}
        if is_first():
            summary = {**self._summary(seconds, steps), **evaluation}
            (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def _evaluate(self, progress: Progress, done: int, state: TrainState) -> dict[str, Any]:
        """Acceptance on the held-out prompts after `done` steps, as it is reported."""
        assert self.held_out is not None
        with progress.paused():
            found = self.held_out(state)
        progress.evaluated(done, found)
        return {"step": done, **found}

    def _summary(self, seconds: float, steps: int) -> dict[str, Any]:
        """`seconds` and `steps` of this session; a resumed run had others before."""
        lines = read_metrics(self.output / "metrics.jsonl").training
        return {
            "steps": self.num_steps,
            "last": lines[-1] if lines else None,
            "session": {"steps": steps, "seconds": round(seconds, 1)},
            "data": self.data.report.as_dict(),
            "sequences": {"count": len(self.data.rows), "filled": self.data.filled},
            "draft_vocab_coverage": round(coverage(self.data.counts, self.d2t), 6),
            "draft_config": dataclasses.asdict(self.head.config),
            "trained_parameters": self.num_parameters,
            "hardware": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "jax": jax.__version__,
            "recipe": flatten(self.recipe),
        }
