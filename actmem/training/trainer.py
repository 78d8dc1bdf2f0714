"""One run, from its configuration to a trained model on disk.

RunConfig -> corpus, tokens -> model -> plan -> laid out -> optimizer -> checkpoint (if any) -> steps -> TrainResult

Of several processes each runs all of it; the first one writes what there is one of: metrics, progress, the model.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actmem.config.idle_sections import idle_sections
from actmem.config.platforms import refuse_other_platforms
from actmem.config.schema import DataConfig, RunConfig
from actmem.errors import CheckpointError, DataError, LayoutError, NonFiniteError
from actmem.models.building import build_model, model_fields
from actmem.models.shapes import build_shapes
from actmem.parallel import clip_gradients
from actmem.parallel.world import World, join
from actmem.planning import Plan
from actmem.planning.sections import name_of, plan_of
from actmem.runtime.apply import rule_source
from actmem.runtime.engine import NoEffectWarning
from actmem.runtime.yardsticks import YARDSTICKS
from actmem.training.budget import AnyPlanned, peaks_of, plan_run
from actmem.training.budget import describe as describe_plan
from actmem.training.capacity import refuse_too_small_tiers
from actmem.training.checkpoint import Checkpoints, describe
from actmem.training.clashes import refuse_clashing_sections
from actmem.training.corpus import open_corpus
from actmem.training.device import choose_device
from actmem.training.export import export_model, gather_model
from actmem.training.laid_out import lay_out
from actmem.training.metrics import EvalRecord, MetricsLog, Record, StartRecord, StepRecord
from actmem.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from actmem.training.packing import Batch, PackedSequences
from actmem.training.peak_memory import PeakMemory, peak_name
from actmem.training.progress import TrainingProgress
from actmem.training.random_state import seed_everything
from actmem.training.run_directory import RunDirectory
from actmem.training.stopping import StopRequest
from actmem.training.token_stream import TokenStream, open_token_stream
from actmem.training.tokenizing import Tokenizer, open_tokenizer
from actmem.units import format_bytes, shown_budget


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `steps` counts those of earlier runs it went on from; `loss` is None where it took none.

    `stopped_by` is the number of the signal that ended it early. `model_dir` holds the trained model and its tokenizer
    in Hugging Face's format once all steps are done, `checkpoint` is the last one this run wrote.
    """

    steps: int
    resumed_from: int
    loss: float | None
    eval_loss: float | None
    stopped_by: int | None
    peak_bytes: int
    peak_source: str
    metrics: Path
    checkpoint: Path | None
    model_dir: Path | None


def train(config: RunConfig, *, progress: bool = True) -> TrainResult:
    """Train as `config` says, going on from the newest checkpoint in `train.output_dir` unless `train.resume` is off.

    Ctrl-C or SIGTERM finishes the step in hand, saves a checkpoint and returns. `progress` shows the run on standard
    error. Raises `DataError`, `ModelError`, `ApplyError`, `PlanError`, `PlatformError`, `CheckpointError`,
    `ConfigError` for sections that recompute and swap one op and for tiers that are too small, `SwapError` for a
    swapped value that cannot be read back, `NonFiniteError` for a loss or gradient that is not finite, and of several
    processes `LayoutError` where they differ and `RankError` for one that the others waited for in vain. Sections
    without effect are told by a `NoEffectWarning`.
    """
    refuse_other_platforms(config)
    refuse_clashing_sections(config)
    directory = RunDirectory(config.train.output_dir)
    with ExitStack() as stack:
        world = stack.enter_context(join(config, choose_device(config.train.device)))
        for idle in idle_sections(config) if world.is_first else ():
            warnings.warn(str(idle), NoEffectWarning, stacklevel=2)
        world.from_first(lambda: _enter(stack, directory))
        _refuse_separate(world, directory)
        shown = stack.enter_context(
            TrainingProgress(config.train.steps, enabled=progress and world.is_first, peak_name=peak_name(world.device))
        )
        trainer = _Trainer(config, world, directory, shown)
        stack.callback(trainer.laid_out.applied.remove)
        trainer.resume()
        stop = stack.enter_context(StopRequest(is_told=world.is_first))
        trainer.run(stop)
        trainer.laid_out.applied.remove()
        return trainer.finish(stop)


def _enter(stack: ExitStack, directory: RunDirectory) -> None:
    stack.enter_context(directory.locked())


def _refuse_separate(world: World, directory: RunDirectory) -> None:
    """Raise `LayoutError` unless all processes see the directory that the first one holds."""
    holders = world.gather(directory.holder())
    apart = [str(rank) for rank, holder in enumerate(holders) if holder != holders[0]]
    if apart:
        error = LayoutError(
            f"train.output_dir {directory.root} is not the directory of rank 0 for rank {', '.join(apart)}; all ranks "
            "write to one: set train.output_dir to a path on storage that the machines share"
        )
        error.is_repeated = not world.is_first
        raise error


class _Trainer:
    """The parts of a run, and the steps over them. `step` counts the optimizer steps that are done."""

    def __init__(self, config: RunConfig, world: World, directory: RunDirectory, progress: TrainingProgress) -> None:
        self.config = config
        self.world = world
        self.directory = directory
        self.progress = progress
        self.device = world.device
        self.tokenizer, self.sequences, self.held_out = _open_data(config, world)
        model = _build(config, self.tokenizer)
        description = describe(model)
        self.num_parameters = model.num_parameters()
        self.planned: AnyPlanned | None = self._find_plan(model)
        self.plan: str | Path | Plan = plan_of(config) if self.planned is None else self.planned.plan
        self.laid_out = lay_out(model, config, self.plan if isinstance(self.plan, Plan) else None, world)
        del model
        self._refuse_too_small_tiers()
        self.optimizer = build_optimizer(self.laid_out.named_parameters().values(), config.train)
        self.checkpoints = Checkpoints(
            directory.checkpoints,
            self.laid_out.models,
            self.optimizer,
            keep=config.train.keep_checkpoints,
            world=world,
            description=description,
        )
        self.peak = PeakMemory(self.device)
        self.step = self.resumed_from = 0
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.checkpoint: Path | None = None

    def resume(self) -> None:
        """Go on from the newest checkpoint, or start with seeded generators where there is none."""
        # Ranks with data of their own draw other numbers; those that share data draw the same.
        seed_everything(self.config.train.seed + self.world.mesh.data_rank)
        if not self.config.train.resume:
            self._refuse_earlier_run()
        elif (resumed := self.checkpoints.resume()) is not None:
            self.sequences.resume(resumed.position)
            self.step = self.resumed_from = resumed.step
            self.progress.say(f"resumed after step {self.step} from {resumed.path}")

    def _find_plan(self, model: PreTrainedModel) -> AnyPlanned | None:
        """The plan for the memory budget, if there is one, found by the first process for all."""
        if self.config.memory_budget is None:
            return None
        self.progress.say(f"looking for the best plan within memory_budget: {shown_budget(self.config.memory_budget)}")
        vocab_size = model.config.vocab_size
        planned = self.world.from_first(
            lambda: plan_run(self.config, build_shapes(self.config.model, vocab_size=vocab_size), mesh=self.world.mesh)
        )
        self.progress.say(describe_plan(planned))
        return planned

    def _tell_peaks(self) -> None:
        """What was predicted of each process, beside what was measured."""
        peaks = self.world.gather((self.world.mesh.rank_of("pp"), self.peak.read_bytes()))
        if self.planned is None:
            return
        predicted = peaks_of(self.planned)
        measured = "resident set, libraries and all" if self.device.type == "cpu" else "measured"
        for rank, (stage, peak) in enumerate(peaks):
            who = f"rank {rank}: " if self.world.size > 1 else ""
            self.progress.say(
                f"{who}predicted peak of tensors {format_bytes(predicted[stage])}; {measured}: {format_bytes(peak)}"
            )

    def _refuse_too_small_tiers(self) -> None:
        """Say before the first step where swapped values would not fit. What a pipeline has under way is not known."""
        if self.plan not in YARDSTICKS and self.config.parallel.pp_size == 1:
            refuse_too_small_tiers(self.config, rule_source(self.plan), self.device, self.world.mesh)

    def run(self, stop: StopRequest) -> None:
        """Steps, with evaluations and checkpoints between them, until all are done or `stop` is wanted anywhere."""
        settings = self.config.train
        with MetricsLog(self.directory.metrics, step=self.step) if self.world.is_first else nullcontext() as metrics:
            self._write(metrics, self._start_record())
            stopped = self._is_stopped(stop)
            while self.step < settings.steps and not stopped:
                record = self._take_step()
                self._write(metrics, record)
                self.progress.show(record)
                if self.held_out and self._is_due(settings.eval_every):
                    self._write(metrics, self._evaluate())
                stopped = self._is_stopped(stop)  # asked once a step: what ends the run is what saves it
                if self._is_due(settings.checkpoint_every) or stopped:
                    self.checkpoint = self.checkpoints.save(self.step, self.sequences.position())

    def _write(self, metrics: MetricsLog | None, record: Record) -> None:
        if metrics is not None:
            metrics.write(record)

    def _is_stopped(self, stop: StopRequest) -> bool:
        """Whether any of the processes had been told to stop when they last asked each other: the same in all of them,
        while the signal itself reaches each at a moment of its own."""
        told = [each for each in self.world.gather(stop.signal_number) if each is not None]
        if told and not stop.wanted:
            stop.signal_number = told[0]
        return bool(told)

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.steps)

    def finish(self, stop: StopRequest) -> TrainResult:
        """Write the model out where all steps are done, and say how the run ended."""
        done = self.step >= self.config.train.steps
        if done:
            self._export()
            self.progress.say(f"all {self.step} steps done; the model is in {self.directory.model}")
        elif stop.signal_number is not None:
            name = signal.Signals(stop.signal_number).name
            self.progress.say(
                f"stopped by {name} after step {self.step}; saved in {self.checkpoint}; run again to go on"
            )
        self._tell_peaks()
        return TrainResult(
            steps=self.step,
            resumed_from=self.resumed_from,
            loss=self.loss,
            eval_loss=self.eval_loss,
            stopped_by=None if done else stop.signal_number,
            peak_bytes=max(self.world.gather(self.peak.read_bytes())),
            peak_source=self.peak.source,
            metrics=self.directory.metrics,
            checkpoint=self.checkpoint,
            model_dir=self.directory.model if done else None,
        )

    def _export(self) -> None:
        """The whole model, put together by the first process where several have parts of it."""
        if self.world.size == 1:
            export_model(self.laid_out.models[0], self.tokenizer, self.directory.model)
            return
        whole = _build(self.config, self.tokenizer) if self.world.is_first else None
        gather_model(self.laid_out.models, whole, self.directory.root, self.world)
        self.world.from_first(lambda: self._write_model(whole))

    def _write_model(self, whole: PreTrainedModel | None) -> None:
        assert whole is not None, "only the first process writes it"
        export_model(whole, self.tokenizer, self.directory.model)

    def _take_step(self) -> StepRecord:
        applied = self.laid_out.applied
        started, swapped = time.perf_counter(), applied.stats.swap
        step, settings = self.step + 1, self.config.train
        rate = learning_rate(step, settings)
        set_learning_rate(self.optimizer, rate)
        loss, router_loss, num_tokens = self._accumulate_gradients()
        if self.step == self.resumed_from:
            self._warn_of_missing_gradients()
        _refuse_non_finite("loss", loss, step)
        norm = clip_gradients(self.laid_out.named_parameters().values(), settings.grad_clip, self.world.mesh)
        _refuse_non_finite("gradient norm", norm, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.loss = step, loss
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        seconds = time.perf_counter() - started
        swap = applied.stats.swap.since(swapped).to_dict() if applied.swaps else None
        of_ranks = self.world.gather((self.peak.read_bytes(), swap))
        peaks, swaps = [peak for peak, _ in of_ranks], [each for _, each in of_ranks if each is not None]
        many = self.world.size > 1
        return StepRecord(
            step=step,
            loss=loss,
            router_loss=router_loss,
            learning_rate=rate,
            grad_norm=norm,
            num_tokens=num_tokens,
            step_seconds=seconds,
            tokens_per_second=num_tokens / seconds,
            peak_bytes=max(peaks),
            swap=swap,
            rank_peak_bytes=peaks if many else None,
            rank_swap=swaps if many and swaps else None,
        )

    def _accumulate_gradients(self) -> tuple[float, float | None, int]:
        """The gradients of one optimizer step; its mean cross-entropy, router loss and number of targets."""
        batches = [self._next_batch() for _ in range(self.config.train.grad_accumulation)]
        num_targets = sum(batch.targets.numel() for batch in batches) * self.world.mesh.data_size
        loss = self.laid_out.steps.gradients([batch.to(self.device) for batch in batches], num_targets)
        router = None if loss.router is None else float(self.world.sum_over_data(loss.router.clone()))
        return self._of_all(loss.cross_entropy), router, num_targets

    def _next_batch(self) -> Batch:
        """This rank's part of the next sequences. All ranks go through them in one order, so that a run can go on with
        another number of ranks."""
        settings, mesh = self.config.train, self.world.mesh
        batch = self.sequences.next_batch(settings.micro_batch_size * mesh.data_size)
        own = slice(mesh.data_rank * settings.micro_batch_size, (mesh.data_rank + 1) * settings.micro_batch_size)
        return Batch(batch.inputs[own], batch.targets[own])

    def _of_all(self, share: Tensor) -> float:
        """The sum of shares of a loss over all ranks that have one."""
        return float(self.world.sum_over_stages(self.world.sum_over_data(share.clone())))

    @torch.no_grad()
    def _evaluate(self) -> EvalRecord:
        """The ranks share the held-out batches. Whoever has none left reads the first again, for nothing: all take part
        in each call."""
        for model in self.laid_out.models:
            model.eval()  # type: ignore[no-untyped-call]
        mesh, total = self.world.mesh, torch.zeros((), device=self.device)
        num_targets = sum(batch.targets.numel() for batch in self.held_out)
        for mine in range(mesh.data_rank, mesh.data_rank + len(self.held_out), mesh.data_size):
            is_own = mine < len(self.held_out)
            batch = self.held_out[mine if is_own else 0].to(self.device)
            share = self.laid_out.steps.evaluate(batch, num_targets)
            total += share if is_own else torch.zeros_like(share)
        self.eval_loss = self._of_all(total)
        for model in self.laid_out.models:
            model.train()
        self.progress.say(f"step {self.step}: held-out loss {self.eval_loss:.4f}")
        return EvalRecord(self.step, self.eval_loss, num_targets)

    def _warn_of_missing_gradients(self) -> None:
        names = [name for name, p in self.laid_out.named_parameters().items() if p.requires_grad and p.grad is None]
        if names:
            warnings.warn(
                f"{len(names)} trainable parameters got no gradient and will not change: {', '.join(names)}; "
                "nothing in the loss depends on them, or their graph was cut; freeze them if that is meant",
                stacklevel=2,
            )

    def _refuse_earlier_run(self) -> None:
        if earlier := self.checkpoints.steps():
            raise CheckpointError(
                f"train.resume is false, yet {self.directory.root} holds the checkpoints of an earlier run, up to "
                f"{earlier[-1].name}; set train.resume: true to go on, or another train.output_dir"
            )

    def _start_record(self) -> StartRecord:
        return StartRecord(
            step=self.step,
            plan=name_of(self.plan),
            device=str(self.device),
            num_parameters=self.num_parameters,
            num_sequences=self.sequences.num_sequences,
            peak_source=self.peak.source,
            num_ranks=self.world.size,
        )


def _open_data(config: RunConfig, world: World) -> tuple[Tokenizer, PackedSequences, list[Batch]]:
    """The tokenizer, the training sequences, and the batches to evaluate on: none where there is no evaluation."""
    settings, length = config.train, config.data.sequence_length
    tokenizer, stream = world.first_goes_ahead(lambda: _open_tokens(config.data))
    sequences = PackedSequences(stream.train, length, seed=settings.seed, identity=stream.identity)
    if not settings.eval_every:
        return tokenizer, sequences, []
    if len(stream.held_out) <= length:
        raise DataError(
            f"the held-out text has {len(stream.held_out)} tokens, and one sequence needs {length + 1}; "
            "raise data.eval_share, add text, or set train.eval_every: 0"
        )
    held_out = PackedSequences(stream.held_out, length, seed=settings.seed, identity=stream.identity)
    return (
        tokenizer,
        sequences,
        held_out.held_out_batches(settings.micro_batch_size, settings.eval_batches * world.mesh.data_size),
    )


def _open_tokens(config: DataConfig) -> tuple[Tokenizer, TokenStream]:
    corpus = open_corpus(config.path)
    try:
        tokenizer = open_tokenizer(config, corpus)
        return tokenizer, open_token_stream(config, corpus, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_dir {config.cache_dir} cannot be used: {error}; free space, or set one that can be written"
        ) from error


def _build(config: RunConfig, tokenizer: Tokenizer) -> PreTrainedModel:
    """The vocabulary fits the tokenizer; that of a preset stays where a tokenizer the user gave fits into it."""
    vocab_size: int | None = tokenizer.vocab_size
    if config.data.tokenizer is not None and config.model.name is not None:
        preset = model_fields(config.model)["vocab_size"]
        vocab_size = None if isinstance(preset, int) and preset >= tokenizer.vocab_size else vocab_size
    return build_model(config.model, vocab_size=vocab_size, seed=config.train.seed)


def _refuse_non_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {what} of step {step} is {value}; that step was not taken, and earlier checkpoints are as they were; "
            "lower train.lr, lengthen train.warmup_steps, or set train.grad_clip"
        )
