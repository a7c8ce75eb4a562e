"""A plan under Hugging Face's Trainer (transformers 5).

Trainer's loop                    here
├── batches                       whole global batches, the same on every rank, in the order of one process
├── training_step                 TrainingStep: micro-batches, pipeline, gathers, update; at the rate of the schedule
├── optimizer.step                already done; the optimizer that the Trainer sees only has the learning rate
├── evaluate                      TrainingStep.evaluate
├── save, resume                  checkpoint-N/sharded is the runtime's, beside the Trainer's own small files
└── callbacks, logging, schedules as they are
"""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from planner.errors import RequestError
from planner.graph.tracing.stacked import PREFIX as STACKED
from planner.graph.tracing.stacked import StackedSamples
from planner.models.huggingface.rewriting import (
    experts_where_they_can,
    trained_without_masks,
    with_experts_as_operators,
)
from planner.models.huggingface.switch import unstacked
from planner.models.huggingface.taken_apart import take_apart, together
from planner.plan.file import load_plan
from planner.plan.outline import has_other_parameters
from planner.plan.plan import Plan
from runtime.integrations.saved_values import as_text
from runtime.integrations.taking_over import (
    check_clipping,
    check_methods,
    check_optimizer,
    let_go,
    missing,
    restore_sharded,
    save_sharded,
    saved_beside,
)
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep, parallelize

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise missing("Hugging Face's Trainer (transformers and accelerate)", error) from error

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
}
"""The values of `TrainingArguments.optim` that the runtime supports."""

_NOT_HERE = {
    "fp16": "a plan has no loss scaling; plan with --precision bf16 and convert the model, or train in fp32",
    "bf16": "the plan decides the precision; plan with --precision bf16 and give model.to(torch.bfloat16)",
    "fp16_full_eval": "evaluation has the precision of the plan; leave it out",
    "bf16_full_eval": "evaluation has the precision of the plan; leave it out",
    "deepspeed": "the plan shards instead; leave it out",
    "fsdp": "the plan shards instead; leave it out",
    "torch_compile": "the runtime runs the operators of the plan; leave it out",
    "gradient_checkpointing": "the plan decides what is recomputed; leave it out, or plan with --recompute",
    "activation_checkpointing": "the plan decides what is recomputed; leave it out, or plan with --recompute",
    "label_smoothing_factor": "the plan trains with the loss of the model; leave it out",
    "auto_find_batch_size": "a plan has one global batch; leave it out",
    "load_best_model_at_end": "the weights are with the ranks; resume from the checkpoint that was best instead",
    "push_to_hub": "checkpoints of a plan are sharded; call save_model, and upload that",
    "neftune_noise_alpha": "noise on embeddings is not in the plan; leave it out",
    "group_by_length": "batches of a plan have one length; leave it out",
    "optim_args": "the plan's optimizer takes learning_rate and adam_*; leave it out",
    "save_only_model": "a checkpoint has the weights with the states, sharded; leave it out, and call save_model",
    "use_liger_kernel": "it changes the operators that the plan was made for; leave it out",
    "parallelism_config": "the plan shards instead; leave it out",
}
"""Arguments that a plan cannot honour, and what to do instead. Arguments that a version does not have are skipped."""

_OWN = (
    "optimizers", "optimizer_cls_and_kwargs", "model_init", "compute_loss_func", "compute_metrics",
    "preprocess_logits_for_metrics",
)  # fmt: skip
_STEPS = ("training_step", "create_optimizer", "create_optimizer_and_scheduler")
_SAMPLERS = ("_get_train_sampler", "_get_eval_sampler")


class PlanTrainer(Trainer):  # type: ignore[misc]  # transformers is not read by mypy
    """A Trainer whose steps are those of a plan, on the processes that a launcher has started.

    `per_device_train_batch_size` times the number of processes is the global batch of the plan, as it is without a
    plan; the plan cuts it into micro-batches. `step` is the `TrainingStep`. At the first batch the weights of `model`
    are taken over and freed there; `save_model` gathers them. Evaluation gives the loss only.

    Raises RequestError for arguments that a plan cannot honour, PlanFileError for a plan for another model.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, plan: Plan | str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        name = _check(self, inspect.signature(Trainer.__init__).bind(self, *args, **kwargs).arguments)
        inputs = {input_name for input_name, _ in self.plan.inputs}
        stacked = isinstance(self.model, StackedSamples)
        self._theirs: Any = self.model.model if stacked else self.model  # the model that `from_pretrained` reads
        if stacked:
            experts_where_they_can(self.model)
        elif isinstance(self.model, PreTrainedModel):
            with_experts_as_operators(self.model)
            if "attention_mask" not in inputs:
                trained_without_masks(self.model)
        if has_other_parameters(self.plan, (name for name, _ in self.model.named_parameters(remove_duplicate=False))):
            take_apart(self.model)
        self._parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._resume: Path | None = None  # a checkpoint that is restored when the model has been traced
        self.step: TrainingStep = parallelize(
            self.model, self.plan, optimizer=_settings(self, name), device=self.args.device, seed=self.args.seed
        )

    # Batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Whole global batches for every rank, in the order in which one process would read them."""
        if self.train_dataset is None:
            raise RequestError("training needs train_dataset=")
        return self._whole_batches(self.train_dataset, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Whole global batches of the plan, in order."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.eval_dataset[found] if isinstance(found, str) else found
        if found is None:
            raise RequestError("evaluation needs eval_dataset=")
        return self._whole_batches(found, shuffle=False)

    def _whole_batches(self, dataset: Any, *, shuffle: bool) -> DataLoader[Any]:
        size, options = self.plan.training.global_batch, self.args
        if not hasattr(dataset, "__len__"):
            raise RequestError(f"{type(dataset).__name__} has no length; a plan under the Trainer takes map-style data")
        over = len(dataset) % size
        if len(dataset) < size or (over and not options.dataloader_drop_last):
            raise RequestError(
                f"the {len(dataset)} samples of {type(dataset).__name__} make {len(dataset) // size} global batches of"
                f" {size} and leave {over}, which a plan cannot take; give dataloader_drop_last=True and {size} or more"
            )
        made: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=size,
            sampler=RandomSampler(dataset) if shuffle else SequentialSampler(dataset),
            collate_fn=self._collator(),
            num_workers=options.dataloader_num_workers,
            pin_memory=options.dataloader_pin_memory and options.device.type != "cpu",
            drop_last=True,
        )
        config = options.accelerator_config
        return prepare_data_loader(  # type: ignore[no-any-return]
            made,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=options.data_seed,
        )

    def _collator(self) -> Any:
        """The collate function, without columns that the model does not take; with stacked samples all columns are
        kept."""
        if self._theirs is not self.model:
            return self.data_collator
        return self._get_collator_with_removed_columns(self.data_collator)

    # Steps

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer object for the learning-rate schedule. The real optimizer is the runtime's."""
        if self.optimizer is None:
            self.optimizer = _Rate(self.args.learning_rate)
        made: torch.optim.Optimizer = self.optimizer
        return made

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: str | None) -> tuple[Any, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(resume)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """A step of the plan on a global batch: its gradients, its update. Returns the mean loss."""
        batch = self._ready(inputs)
        self.step.optimizer.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        return torch.tensor(self.step(batch), device=self.args.device)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of a global batch, with the model in evaluation mode."""
        return torch.tensor(self.step.evaluate(self._ready(inputs)), device=self.args.device), None, None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported under a plan: raises RequestError."""
        raise RequestError("predict: a plan computes losses; save_model, and predict with what it has written")

    def _ready(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a batch with which the model was planned; the first batch traces the model and frees its
        weights."""
        batch = _as_planned(inputs, {name for name, _ in self.plan.inputs})
        if not self.step.ready:
            self.model.train()  # as it was planned: the first batch may be one of an evaluation
            self.step.prepare(batch)
            let_go(self.model)
        if self._resume is not None:
            resume, self._resume = self._resume, None
            restore_sharded(self.step, resume)
        return batch

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return self.step.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self.step.gradient_norm

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: every rank takes only its pieces."""

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Count a batch once: every process has all of it, and the Trainer adds what the processes have."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.args.world_size

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """6 times parameters times tokens (Kaplan et al. 2020), of this rank's share."""
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        tokens = main.numel() if isinstance(main, torch.Tensor) else 0
        return int(6 * tokens * self._parameters // max(self.args.world_size, 1))

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model as `from_pretrained` reads it, gathered into the memory of every rank. Collective. In a
        training checkpoint the weights are sharded instead (see `plan checkpoint merge`)."""
        if _internal_call:
            return
        if not self.step.ready:
            raise RequestError("save_model: train on a batch first; the weights are still those of the model")
        tensors = self.step.full_parameters() | self.step.changed_buffers()
        planned, self.model = self.model, self._theirs
        try:
            if planned is not self.model:
                tensors = {name.removeprefix(STACKED): tensor for name, tensor in tensors.items()}
            if self.args.should_save:  # before 5.24 `_save` does not ask, and all processes wrote the same files
                self._save(output_dir, state_dict=together(self.model, unstacked(self.model, tensors)))
        finally:
            self.model = planned

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        rates = as_text({"optimizer": self.optimizer.state_dict(), "schedule": self.lr_scheduler.state_dict()}, folder)
        save_sharded(self.step, folder, rates)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Remember the checkpoint; the weights are loaded at the first batch, when the model has been traced."""
        self._resume = Path(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            rates = saved_beside(Path(checkpoint))
            self.optimizer.load_state_dict(rates["optimizer"])
            self.lr_scheduler.load_state_dict(rates["schedule"])


class _Rate(torch.optim.Optimizer):
    """Holds a learning rate, and updates nothing."""

    def __init__(self, rate: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(0))], {"lr": rate})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: the step of the plan has updated the weights."""


def _as_planned(inputs: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The batch without an all-ones mask, if the plan has no mask. Raises RequestError for a mask that hides
    anything."""
    mask = inputs.get("attention_mask")
    if mask is None or "attention_mask" in names:
        return dict(inputs)
    if not bool((mask != 0).all()):
        raise RequestError(
            "the batch has padding (attention_mask with zeros), and the plan was made for sequences without; pack or"
            " cut them to one length, or plan with a factory whose example has an attention_mask"
        )
    return {name: value for name, value in inputs.items() if name != "attention_mask"}


def _settings(trainer: PlanTrainer, name: str) -> OptimizerSettings:
    """Hyperparameters as the Trainer would give them to its own optimizer; norms and biases do not decay."""
    options, decayed = trainer.args, set(trainer.get_decay_parameter_names(trainer.model))
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    decay, undecayed = float(options.weight_decay), frozenset(trained) - decayed
    if name == "sgd":
        return OptimizerSettings(
            learning_rate=options.learning_rate, weight_decay=decay, momentum=0.0, undecayed=undecayed
        )
    return OptimizerSettings(
        learning_rate=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        epsilon=options.adam_epsilon,
        weight_decay=decay,
        undecayed=undecayed,
    )


def _check(trainer: PlanTrainer, given: Mapping[str, Any]) -> str:
    """Raise RequestError for what a plan cannot honour; returns the name of its optimizer."""
    options, plan = trainer.args, trainer.plan
    for argument, reason in _NOT_HERE.items():
        value = getattr(options, argument, None)
        if value:
            raise RequestError(f"TrainingArguments({argument}={value!r}): {reason}")
    for argument in _OWN:
        if given.get(argument) not in (None, (None, None)):
            raise RequestError(
                f"{argument}=: a plan trains with the loss of the model and its own optimizer; leave it out"
            )
    check_methods(trainer, Trainer, ("compute_loss",), "put the loss into the model's forward, and plan that")
    check_methods(trainer, PlanTrainer, _STEPS, "the runtime computes gradients and updates the weights; leave it out")
    check_methods(
        trainer, Trainer, _SAMPLERS, "a plan takes samples at random in training, in order else; leave it out"
    )
    for callback in trainer.callback_handler.callbacks:
        check_methods(
            callback,
            TrainerCallback,
            ("on_pre_optimizer_step",),
            "is called with gradients, which the runtime has used up by then; use on_step_end",
        )
    if options.gradient_accumulation_steps != 1:
        raise RequestError(
            f"gradient_accumulation_steps={options.gradient_accumulation_steps}: the plan has micro-batches of its own"
            f" ({plan.training.micro_batches}); give 1, and count all samples of a step into the global batch"
        )
    sampling = getattr(options, "train_sampling_strategy", None) or "random"
    if str(getattr(sampling, "value", sampling)) != "random":
        raise RequestError(f"train_sampling_strategy='{sampling}': a plan takes samples at random; leave it out")
    _check_batch(options, plan)
    check_clipping(options.max_grad_norm, "max_grad_norm", plan)
    optim = str(getattr(options.optim, "value", options.optim))
    if optim not in _OPTIMIZERS:
        raise RequestError(f"optim='{optim}': a plan is trained with {', '.join(_OPTIMIZERS)}; take one of these")
    check_optimizer(_OPTIMIZERS[optim], plan)
    return _OPTIMIZERS[optim]


def _check_batch(options: "TrainingArguments", plan: Plan) -> None:
    size, world, planned = options.train_batch_size, options.world_size, plan.training.global_batch
    if size * world != planned:
        each, over = divmod(planned, world)
        advice = f"give per_device_train_batch_size={each}" if not over else f"plan with a multiple of {world}"
        raise RequestError(
            f"per_device_train_batch_size={size} on {world} processes makes a global batch of {size * world}, and the"
            f" plan has {planned}; {advice}, or plan with --global-batch {size * world}"
        )
