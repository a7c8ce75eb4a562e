"""A plan as a strategy of Lightning (lightning 2.5 or newer).

Lightning's loop                  here
├── batches                       what the DataLoader gives: whole global batches, the same on every rank
├── training_step                 traced once; then TrainingStep computes it under the plan, and updates
├── backward, optimizer.step      already done; the optimizer that Lightning sees has the learning rate
├── validation_step               TrainingStep.evaluate, logged under the name that `validation` gives
├── save_checkpoint, ckpt_path    a folder: sharded/ of the runtime, with Lightning's own state in it
└── callbacks, loggers, schedules as they are
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import RequestError
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from runtime.checkpoint.together import said_by_first
from runtime.comm.device_mesh import current_device, join_processes, local_rank
from runtime.comm.exchange import rank_number, world
from runtime.integrations.saved_values import as_text
from runtime.integrations.taking_over import (
    check_clipping,
    check_methods,
    check_steady,
    let_go,
    missing,
    restore_sharded,
    save_sharded,
    saved_beside,
    settings_of,
)
from runtime.integrations.training_step_module import PREFIX, TrainingStepModule
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep, parallelize

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as error:
    raise missing("Lightning", error) from error

_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")
_OF_STEPS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")
_NO_GRADIENTS = "the runtime computes and uses up gradients within a step, and calls nothing with them; leave it out"
_NO_STEPS = "the runtime computes gradients, clips them (plan with --clip-norm) and updates the weights; leave it out"
_OF_WEIGHTS = {
    "BaseFinetuning", "BatchSizeFinder", "LearningRateFinder", "ModelPruning", "StochasticWeightAveraging",
    "WeightAveraging",
}  # fmt: skip
"""Callbacks by name, as not every version of Lightning has all of them."""

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def as_planned(module: nn.Module) -> nn.Module:
    """A LightningModule for `plan --model package.module:factory`, with an example of a batch:

    def planned():
        return as_planned(Classifier()), (images, labels)
    """
    return TrainingStepModule(module)


class PlanStrategy(Strategy):  # type: ignore[misc]  # lightning is not read by mypy
    """Trains and validates a LightningModule under a plan that was made for `as_planned(module)`, on the processes that
    a launcher has started.

    The DataLoader gives whole global batches of the plan, the same on every rank: seed whatever shuffles
    (`lightning.seed_everything`). `configure_optimizers` gives one AdamW, Adam or SGD over all weights, whose groups
    may have no weight decay, and any schedules. `validation` is the name under which the loss on validation batches is
    logged; it is the loss of `training_step` with the model in evaluation mode, and `validation_step` itself is not
    called. `step` is the `TrainingStep`.

    Raises RequestError for settings that a plan cannot honour, PlanFileError for a plan for another model.
    """

    strategy_name = "plan"
    is_distributed = False  # Lightning must not give every rank different samples

    def __init__(
        self, plan: Plan | str | os.PathLike[str], *, validation: str | None = None, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        self._validation, self._seed = validation, seed
        self._device = current_device(local_rank())
        self._planned: TrainingStepModule | None = None
        self._step: TrainingStep | None = None
        self._modes: dict[nn.Module, bool] = {}  # whether each module trains, as `fit` found it
        self._begun: list[dict[str, Any]] = []  # the groups of the optimizer, as `configure_optimizers` gave them
        self._resume: Path | None = None  # a checkpoint that is restored when the model has been traced

    # Processes

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._device

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return rank_number()

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return world()

    @property
    def local_rank(self) -> int:
        """The local rank of this process on its host."""
        return local_rank()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return rank_number() == 0

    def setup_environment(self) -> None:
        """Join the processes that a launcher has started."""
        join_processes(self._device)
        super().setup_environment()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor over the processes of a group, or all: its mean, sum, maximum or minimum."""
        if not isinstance(tensor, torch.Tensor) or world() == 1:
            return tensor
        name = str(reduce_op or "mean").rpartition(".")[2].lower()
        found = tensor.clone()
        dist.all_reduce(found, op=_OPERATIONS.get(name, dist.ReduceOp.SUM), group=group)
        return found / dist.get_world_size(group) if name in ("mean", "avg") else found

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if world() > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of the first process on every process; it must be JSON data. Nothing is unpickled."""
        if src != 0:
            raise RequestError(f"broadcast(src={src}): only the first process tells the others")
        return said_by_first(lambda: os.fspath(obj) if isinstance(obj, os.PathLike) else obj, Any)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all processes, along a new first dim."""
        if world() == 1:
            return tensor.unsqueeze(0)
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor.contiguous(), group=group)
        return torch.stack(found)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes, or any of them, decide True."""
        found = self.reduce(torch.tensor(int(decision), device=self._device), reduce_op="sum")
        return int(found) == world() if all else int(found) > 0

    # The model

    @property
    def step(self) -> TrainingStep:
        """The training step. Raises RequestError before `fit` has made it."""
        if self._step is None:
            raise RequestError("there is no training step before fit")
        return self._step

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into the training step."""
        return True

    def model_to_device(self) -> None:
        """Does nothing: every rank takes only its pieces, at the first batch."""

    def setup(self, trainer: Any) -> None:
        """Check the settings, and make the training step. For validation alone, the step of an earlier `fit` is kept,
        with its trained weights."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        validates = trainer.state.fn == TrainerFn.VALIDATING
        if not validates and trainer.state.fn != TrainerFn.FITTING:
            raise RequestError(
                f"Trainer.{trainer.state.fn}: PlanStrategy trains and validates; load the weights that full_state_dict"
                " gives into the module, and test or predict with another strategy"
            )
        self.accelerator.setup(trainer)
        _check(trainer, self.plan, self._validation)
        if validates and self._has_trained(self.lightning_module):
            return
        settings = None if validates else self._settings(trainer)
        self._planned = TrainingStepModule(self.lightning_module)
        self._modes = {module: module.training for module in self._planned.modules()}
        self._step = parallelize(self._planned, self.plan, optimizer=settings, device=self._device, seed=self._seed)

    def _has_trained(self, module: Any) -> bool:
        """Whether the training step has been made from this module's weights."""
        own = self._planned is not None and self._planned.module is module
        return own and self._step is not None and self._step.ready

    def _settings(self, trainer: Any) -> OptimizerSettings:
        """The settings of the one optimizer that the module configures."""
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise RequestError(f"configure_optimizers gave {len(self.optimizers)} optimizers; a plan has one")
        self._begun = [dict(group) for group in self.optimizers[0].param_groups]
        return settings_of(self.optimizers[0], self.lightning_module, self.plan, PREFIX)

    def _ready(self, batch: Any) -> TrainingStep:
        """The training step; the first batch traces the module and frees its weights."""
        step, module = self.step, self.lightning_module
        if not step.ready:
            assert self._planned is not None
            with _detached(module), _in_modes(self._modes):
                step.prepare(batch)
            let_go(module)
            if self._planned.logged.others:
                rank_zero_warn(
                    f"training_step logs {', '.join(self._planned.logged.others)}, which a plan does not compute: of"
                    " what it logs only the loss is logged"
                )
        if self._resume is not None:
            resume, self._resume = self._resume, None
            restore_sharded(step, resume)
        return step

    # Steps

    def training_step(self, batch: Any, *rest: Any, **more: Any) -> torch.Tensor:
        """A step of the plan on a global batch: its gradients, its update. Returns the mean loss."""
        _check_accumulation(self.lightning_module.trainer, self.plan)  # a callback may change it during training
        step = self._ready(batch)
        check_steady(self.optimizers[0], self._begun)
        rates = {float(group["lr"]) for group in self.optimizers[0].param_groups}
        if len(rates) > 1:
            raise RequestError(
                "the groups of the optimizer have several learning rates, and a plan has one; give all one schedule"
            )
        (step.optimizer.learning_rate,) = rates
        loss = torch.tensor(step(batch), device=self._device)
        assert self._planned is not None
        for name, options in self._planned.logged.losses.items():
            self.lightning_module.log(name, loss, **options)
        return loss

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Does nothing: the step of the plan has done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Call the closure, which is the step of the plan including the update."""
        found = closure()
        optimizer._opt_called = True  # read by learning-rate schedules
        return found

    def validation_step(self, batch: Any, *rest: Any, **more: Any) -> torch.Tensor:
        """The loss of a global batch, with the model in evaluation mode."""
        loss = torch.tensor(self._ready(batch).evaluate(batch), device=self._device)
        self.lightning_module.log(self._validation, loss, on_epoch=True, batch_size=self.plan.training.global_batch)
        return loss

    # Checkpoints

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights and changed buffers, by the LightningModule's names, on every rank. Collective."""
        found = self.step.full_parameters() | self.step.changed_buffers()
        return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the runtime saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The learning rate; the runtime saves the rest."""
        return {"lr": float(optimizer.param_groups[0]["lr"])}

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder with the sharded weights and states, and Lightning's own state. Collective."""
        folder = Path(filepath)
        save_sharded(self.step, folder, as_text(checkpoint, folder))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's own state; weights and states are loaded at the first batch. No code of the file is run."""
        self._resume = Path(checkpoint_path)
        found: dict[str, Any] = saved_beside(self._resume)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: the weights are loaded at the first batch."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the learning rate; the states are loaded at the first batch."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            for group in optimizer.param_groups:
                group["lr"] = state["lr"]


@contextlib.contextmanager
def _detached(module: Any) -> Iterator[None]:
    """Inside of this context a LightningModule has no trainer, which would otherwise be copied when it is traced."""
    trainer = module._trainer
    module._trainer = None
    try:
        yield
    finally:
        module._trainer = trainer


@contextlib.contextmanager
def _in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Inside of this context modules train or evaluate as given: the first batch, which is traced, may be one of
    Lightning's sanity check, for which the module evaluates."""
    before = {module: module.training for module in modes}
    try:
        for module, training in modes.items():
            module.training = training
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _check_accumulation(trainer: Any, plan: Plan) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise RequestError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: the plan has micro-batches of its own"
            f" ({plan.training.micro_batches}); give 1, and batches with all samples of a step"
        )


def _check(trainer: Any, plan: Plan, validation: str | None) -> None:
    """Raise RequestError for settings that a plan cannot honour."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise RequestError("automatic_optimization=False: a plan makes the steps; leave it on")
    check_methods(module, LightningModule, _OF_STEPS, _NO_STEPS)
    check_methods(module, LightningModule, _OF_GRADIENTS, _NO_GRADIENTS)
    for callback in trainer.callbacks:
        if _OF_WEIGHTS & {kind.__name__ for kind in type(callback).__mro__}:
            raise RequestError(
                f"{type(callback).__name__}: reads or changes whole weights, or tries steps, and a plan keeps weights"
                " in pieces; leave it out"
            )
        check_methods(callback, Callback, _OF_GRADIENTS, _NO_GRADIENTS)
    _check_accumulation(trainer, plan)
    if str(trainer.precision) != "32-true":
        raise RequestError(
            f"precision='{trainer.precision}': the plan decides the precision; leave it out, plan with --precision bf16"
            " and convert the module, or train in fp32"
        )
    algorithm = trainer.gradient_clip_algorithm
    if trainer.gradient_clip_val and str(getattr(algorithm, "value", algorithm) or "norm") != "norm":
        raise RequestError("gradient_clip_algorithm='value': a plan clips the global norm; leave it out")
    check_clipping(trainer.gradient_clip_val, "gradient_clip_val", plan)
    meanwhile = trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined() and trainer.enable_validation
    if validation is None and (meanwhile or trainer.state.fn == TrainerFn.VALIDATING):
        raise RequestError(
            "the Trainer validates, and a plan computes the loss of training_step alone: give"
            " PlanStrategy(..., validation='val_loss') to log that, as the model is evaluated, or"
            " limit_val_batches=0"
        )
