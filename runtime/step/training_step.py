"""The user's interface to the training step of a plan.

    step = parallelize(module, plan)         # on every rank
    loss = step(tokens, labels)              # the whole global batch, the same on every rank

The model is traced at the first batch, or earlier with an example. Only then it is known whether the plan is for this
model, so the `rank` is built at that moment.
"""

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import LossSpikeError, ModelError, NonFiniteError, RequestError, RunError
from planner.graph.constant_batch import check_numbers
from planner.graph.forward_only import without_updates
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import asks_for_values, trace
from planner.graph.tracing.on_meta import on_meta
from planner.plan.binding.apart import graph_of
from planner.plan.binding.bind import bind
from planner.plan.file import load_plan
from planner.plan.layout.parameter_owners import check_owners
from planner.plan.plan import Plan
from planner.sharding.discover import prove, with_rules
from planner.sharding.fixed_batch import batch_fault
from planner.sharding.padded_batch import SAMPLE_WEIGHTS
from runtime.comm.device_mesh import Communicators, RankMesh, current_device, join_processes, local_rank, rank_mesh
from runtime.comm.groups import Groups, set_last
from runtime.executor.lowering.compiled import check_compiler
from runtime.guard_settings import GuardSettings
from runtime.offload.storage import Outside
from runtime.optimizers.hyperparameters import RunningOptimizer
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.parameters.initial_values import check_values
from runtime.servers.addresses import Addresses
from runtime.step.arguments import InputMatcher, arguments_of, forward_of, matcher
from runtime.step.evaluation import Evaluation
from runtime.step.guard import Trouble
from runtime.step.inputs import InputPieces, Inputs, LocalBatch
from runtime.step.narrow_products import narrow_products
from runtime.step.same_batch import check_same_batch
from runtime.step.step import RankStep


class TrainingStep:
    """A training step on this rank. Make it with `parallelize`; every call is collective.

    `optimizer` has the hyperparameters, `steps` the number of completed steps, `loss` the mean loss of the last batch,
    and `trouble` the reason if the last batch made no step.

    An exception inside a step aborts it, except for a non-finite loss or a loss spike, on which all ranks agree.
    Messages of an aborted step may still be in flight, and a receive that was posted for one would take the first
    message of the next step; gradients and weights may be those of half a step. So later calls raise RunError: the
    processes must be restarted.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        place: RankMesh,
        settings: OptimizerSettings,
        traced: OperatorGraph | None = None,
        seed: int = 0,
        check_layouts: bool = True,
        check_gradients: bool = False,
        outside: Outside | None = None,
        guard: GuardSettings | None = None,
        rollback: Callable[["TrainingStep"], None] | None = None,
        servers: Addresses | None = None,
        lowered: bool = True,
        compiled: bool = False,
    ) -> None:
        self.plan = plan
        self._lowered, self._compiled = lowered, compiled
        self._servers = servers
        self._outside = outside
        self._guard, self._rollback = guard, rollback
        self._seed, self._check_layouts, self._check_gradients = seed, check_layouts, check_gradients
        self.place = place
        self._groups = Groups(place=place, bound=None)
        self.optimizer = RunningOptimizer(settings)
        self.loss: float | None = None
        self.before_step: Callable[[], None] = _nothing  # raises errors from outside of training, such as saving
        self._aborted: str | None = None  # the error that aborted a step
        self._compared = False  # whether the first batches of all ranks have been compared
        self._module: nn.Module | None = module  # until its weights are taken over
        self._forward = forward_of(module)
        self._traced = traced
        self.traced: tuple[OperatorGraph, int]  # the graph of the model, and the samples of its example, once prepared
        self._built: tuple[RankStep, InputPieces, InputMatcher] | None = None
        _alive.add(self)
        set_last(self)

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        """Train on one global batch and return its mean loss.

        A batch is what the model takes: its arguments, or one tuple or mapping of them, with the samples of the whole
        global batch, the same on every rank; or a batch of a `runtime.loader`. Raises RequestError for another
        structure or other shapes, and where the ranks were given different batches in the first step; RunError after an
        aborted step.
        """
        self._begin()
        self._check_trains()
        return self._trained(self.inputs_of(*args, **kwargs))

    def _trained(self, inputs: Inputs) -> float:
        """Train on one global batch, and roll back if `guard` wants that."""
        rate = self.optimizer.rate(self.steps)  # an error here aborts nothing
        with self._whole():
            self.loss = self.rank(inputs, rate)
        if self.trouble is not None and self.trouble.action == "rollback":
            assert self._rollback is not None, "parallelize has asked for it"
            self._rollback(self)
        return self.loss

    def window(self, batches: Sequence[Any]) -> list[float]:
        """Train on several global batches, in any form that a step takes, and return the mean loss of each.

        Under a schedule without a flush ("pipedream", "pipedream_2bw") they follow each other without a break, and the
        pipeline drains after the last; under other schedules this is one step after the other.
        """
        self._begin()
        self._check_trains()
        inputs = [self.inputs_of(batch) for batch in batches]
        if self.plan.schedule_kind.flushes:
            return [self._trained(one) for one in inputs]
        rates = [self.optimizer.rate(self.steps + number) for number in range(len(inputs))]
        with self._whole():
            losses = self.rank.window(inputs, rates) if inputs else []
        self.loss = losses[-1] if losses else self.loss
        return losses

    @property
    def trouble(self) -> Trouble | None:
        """Why the last batch made no step, if `guard` skips such steps or rolls back; None where it made one."""
        return self.rank.trouble if self.ready else None

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return self.rank.steps if self.ready else 0

    def evaluate(self, *args: Any, **kwargs: Any) -> float:
        """The mean loss of a global batch under `model.eval()`, forward only: no dropout, batch norm uses its running
        statistics, and no weight, gradient, state or buffer changes.

        Takes the same arguments as a training step, and raises RequestError as it does. The loss may be non-finite;
        that raises nothing.
        """
        return self._evaluated((), args, kwargs).loss

    def evaluate_with(self, outputs: Sequence[str], *args: Any, **kwargs: Any) -> Evaluation:
        """As `evaluate`, with values that the model computes: "logits", the input of its cross entropy, or names in the
        operator list of `plan show`. They are returned for the whole global batch, in the memory of every rank's host.

        Raises RequestError for a name of nothing that the model computes.
        """
        return self._evaluated(tuple(outputs), args, kwargs)

    def accumulate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a global batch: adds to the gradients, changes no weight. Returns the mean loss."""
        self.check_whole()
        self._check_trains()
        inputs = self.inputs_of(*args, **kwargs)
        with self._whole():
            return self.rank.accumulate(inputs)

    @property
    def groups(self) -> Groups:
        """The processes of the plan by name: data, tensor, pipeline, mesh axes and so on."""
        bound = None if self._built is None else self._built[0].bound
        if self._groups.bound is not bound:
            self._groups = Groups(place=self.place, bound=bound)
        return self._groups

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the gradients of the last step, before clipping; None where the plan clips nothing."""
        return self.rank.gradient_norm

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole weights by name, gathered from all ranks; tied weights under their first name."""
        return self.rank.full_parameters()

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the model changes during training, whole on every rank."""
        return self.rank.changed_buffers()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients of the trainable parameters accumulated since the last update, summed over all ranks."""
        return self.rank.full_gradients()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Trace the model with an example, which may have more samples than the plan was traced with, and build this
        rank's share. Does nothing if that was done before.

        Raises PlanFileError for a plan for another model, RuleError for a rule of the plan that does not hold,
        ModelError for a model that cannot be traced or executed, PlannerError for one that cannot be cut into the
        stages of the plan.
        """
        if self._module is None:
            return
        names = tuple(name for name, _ in self.plan.inputs if name != SAMPLE_WEIGHTS)
        given = arguments_of(self._forward, args, kwargs, names)
        batch = self.plan.model.batch
        if batch is None:  # a plan file without the sample count: the example must be the one of planning
            batch = next((tensor.shape[0] for tensor in given.tensors() if tensor.dim()), 1)
        elif self._traced is None:
            given = given.samples(batch)
        known = self._traced
        graph = trace(on_meta(self._module), given.args, given.kwargs) if known is None else known
        pattern = matcher(self._forward, graph.inputs, given)
        bound = bind(self.plan, graph, batch)
        check_owners(bound)
        ruled = with_rules(graph, self.plan.rules)
        prove(ruled)
        batched = graph.batched_inputs(batch)
        training, module = self.plan.training, self._module

        def retrace(samples: int) -> OperatorGraph:
            again = given.samples(samples)
            return trace(on_meta(module), again.args, again.kwargs)

        if known is None and training.update.padding_samples:  # a micro-batch has fewer samples than the graph
            fault = batch_fault(ruled, batch, retrace)
            if fault is not None:
                raise ModelError(f"training.padding_samples: no sample can be added; {fault}")
        if known is None and training.part != batch:
            if training.part == 1 and asks_for_values(on_meta(module), given.args, given.kwargs):
                fault = batch_fault(ruled, batch, retrace)  # the graph for one sample differs
                if fault is not None:
                    raise ModelError(fault)
            else:
                traced = graph_of(self.plan, retrace(training.part))
                check_numbers(bound.whole, traced if self.plan.schedule_kind.trains else without_updates(traced))
        settings = self.optimizer.settings.of_parameters(p.names for p in bound.whole.parameters)
        check_values(self._module, bound, self.place.device)
        rank = RankStep(
            self._module,
            bound,
            self.place,
            settings,
            batched,
            self._seed,
            self._check_layouts,
            self._outside,
            self._guard,
            self._servers,
            self._lowered,
            self._compiled,
        )
        rank.check_gradients = self._check_gradients
        pieces = InputPieces(bound=bound, place=self.place, batched=batched, reads=rank.reads)
        self._built = (rank, pieces, pattern)
        self.traced = graph, batch
        self._module = self._traced = None

    @property
    def ready(self) -> bool:
        """Whether the model has been traced and this rank's share is built."""
        return self._built is not None

    @property
    def rank(self) -> RankStep:
        """This rank's part of the step. Raises RequestError before the model was traced."""
        return self._known[0]

    @property
    def pieces(self) -> InputPieces:
        """How this rank's inputs are cut. Raises RequestError before the model was traced."""
        return self._known[1]

    @property
    def matcher(self) -> InputMatcher:
        """Matches a batch with the inputs. Raises RequestError before the model was traced."""
        return self._known[2]

    def inputs_of(self, *args: Any, **kwargs: Any) -> Inputs:
        """This rank's pieces of a batch, by the number of the micro-batch."""
        if len(args) == 1 and isinstance(args[0], LocalBatch):
            pieces, whole = self.pieces.of_local(args[0]), None
        else:
            self.prepare(*args, **kwargs)
            given = self.matcher.inputs(args, kwargs)
            pieces, whole = self.pieces.of_whole(given), given.values()
        if not self._compared:
            check_same_batch(whole, self.place.device)
            self._compared = True
        return pieces

    def _evaluated(self, outputs: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluation:
        self._begin()
        inputs = self.inputs_of(*args, **kwargs)  # traces the model if needed
        forward = self.rank.forward_pass(outputs)
        with self._whole():
            return forward(inputs)

    def check_whole(self) -> None:
        """Raise RunError where an earlier step was aborted: collective operations are then no longer valid."""
        if self._aborted is not None:
            raise RunError(
                f"an earlier step was aborted by {self._aborted}. Its collectives may still be in flight, and gradients"
                " and weights may be those of half a step: start the processes again, and resume from the last"
                " checkpoint (plan run --continue; in a program Checkpoints.restore)"
            )

    def _begin(self) -> None:
        """Before any batch: raise errors from outside of training, or of an earlier step."""
        self.before_step()
        self.check_whole()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Mark the step as aborted on any exception except those on which all ranks agree."""
        try:
            with narrow_products(self.plan.training.precision):
                yield
        except (NonFiniteError, LossSpikeError):
            raise
        except BaseException as error:
            self._aborted = f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")
            raise

    def _check_trains(self) -> None:
        """Raise RequestError where the plan has no backward pass."""
        if not self.plan.schedule_kind.trains:
            raise RequestError(
                "the plan is forward only, and has no backward pass, gradients or optimizer: call step.evaluate(batch),"
                " or plan without --forward-only to train"
            )

    @property
    def _known(self) -> tuple[RankStep, InputPieces, InputMatcher]:
        if self._built is None:
            raise RequestError(
                "the model has not been traced yet: train on a batch first, or give parallelize an example"
            )
        return self._built


def _nothing() -> None:
    """Does nothing."""


_alive: weakref.WeakSet[TrainingStep] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """At interpreter exit, release process groups, which ends their threads. A gloo thread that frees the tensors of
    the last collective after that aborts the process (2.13). After an error nothing is waited for.
    """
    if hasattr(sys, "last_value"):
        return
    for step in list(_alive):
        step.__dict__.clear()
    gc.collect()


def _check_kinds(model: object, plan: object, optimizer: object) -> None:
    """Raise RequestError for arguments of `parallelize` of a type that is not theirs."""
    if not isinstance(model, nn.Module):
        hint = "; call the function that builds it" if callable(model) else ""
        raise RequestError(f"model is of type {type(model).__name__}: give an nn.Module{hint}")
    if not isinstance(plan, Plan | str | os.PathLike):
        hint = "; of a result of planner.search that is result.plan" if hasattr(plan, "plan") else ""
        raise RequestError(f"plan is of type {type(plan).__name__}: give a Plan, or the path of a plan file{hint}")
    if optimizer is not None and not isinstance(optimizer, OptimizerSettings):
        raise RequestError(
            f"optimizer is of type {type(optimizer).__name__}: give runtime.OptimizerSettings(learning_rate=...); which"
            " optimizer updates the weights is a decision of the plan (plan --optimizer)"
        )


def parallelize(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    optimizer: OptimizerSettings | None = None,
    example: Any = None,
    device: torch.device | None = None,
    traced: OperatorGraph | None = None,
    known: Communicators | None = None,
    seed: int = 0,
    check_layouts: bool = True,
    check_gradients: bool = False,
    offload_folder: str | os.PathLike[str] | None = None,
    guard: GuardSettings | None = None,
    rollback: Callable[[TrainingStep], None] | None = None,
    servers: Addresses | None = None,
    lowered: bool = True,
    compiled: bool = False,
    listen: str | None = None,
) -> TrainingStep:
    """The training step of `plan`, or of the plan in a file, for `model`, whose real weights are taken over.

    Collective: every rank calls it. Under torchrun it joins the processes, if the program has not, with sockets on the
    network interface `listen` (its name, an address or a network; loopback where all processes are on one host). The
    model is traced at the first batch; with `example`, a batch of any size in any form that a step takes, at once.
    `traced` is its graph where that is known; `known` has the process groups of an earlier step. `seed`, the same on
    every rank, decides which elements are dropped, if the model has dropout, whatever the plan. With `check_layouts`
    the first step checks that every tensor is as the plan promises; with `check_gradients` every step checks that
    gradients are finite. `offload_folder` is the folder for files of what the plan offloads to a disk; default: the
    folder of temporary files. `guard` says what to do with a step whose loss or gradients are not finite or whose loss
    spikes. If that includes rollback, `rollback` is called on every rank, and must bring weights, states and buffers
    back to an earlier step. `servers` are the addresses of the plan's parameter servers, if it has any. Without
    `lowered`, operators run one by one in the general executor, which does the same and takes longer on the host: the
    reference for the programs that are written from the plan (see `runtime.executor.lowering`). With `compiled`, these
    have chains of elementwise operators fused by `torch.compile`, which rounds slightly differently.

    Raises PlanFileError for a plan that cannot be read, RequestError for one for another number of devices, or where
    `torch.compile` is requested and does not work, and with an example all that `TrainingStep.prepare` raises.
    """
    _check_kinds(model, plan, optimizer)
    if compiled and not lowered:
        raise RequestError("compiled=True: the general executor runs operators one by one; leave out lowered=False")
    loaded = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    if check_gradients and not loaded.schedule_kind.flushes:
        raise RequestError(
            f"check_gradients checks all gradients before the update, but schedule '{loaded.schedule}' updates weights"
            " within a step; leave it out, or use the schedule '1f1b'"
        )
    if guard is not None:
        guard.check_schedule(loaded.schedule)
        if guard.rolls_back and rollback is None:
            raise RequestError("guard: rollback needs rollback= of parallelize; give it, or use skip")
    own = device or current_device(local_rank())
    if compiled:
        check_compiler(own)
    join_processes(own, listen)
    place = rank_mesh(loaded.mesh, own, loaded.pipeline, known)
    step = TrainingStep(
        model,
        loaded,
        place,
        optimizer or OptimizerSettings(),
        traced,
        seed,
        check_layouts,
        check_gradients,
        Outside(folder=None if offload_folder is None else Path(offload_folder)),
        guard,
        rollback,
        servers,
        lowered,
        compiled,
    )
    if example is not None:
        step.prepare(example)
    return step
