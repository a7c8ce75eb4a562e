"""What a plan cannot honour of the settings of other training loops is refused by name, with what to do."""

import importlib
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import CheckpointError, RequestError
from planner.plan.writing import write_atomically
from planner.sharding.update import Update
from runtime.checkpoint.manifest import FORMAT_VERSION, Manifest, Progress, write_manifest
from runtime.integrations import taking_over
from runtime.integrations.saved_values import as_text, values_of
from runtime.integrations.taking_over import check_clipping, let_go, settings_of
from runtime.integrations.training_step_module import TrainingStepModule


def plan(**training: Any) -> Any:
    """As much of a plan as the checks read."""
    known = {"optimizer": "adamw", "global_batch": 8, "micro_batches": 2, "update": Update()}
    return SimpleNamespace(training=SimpleNamespace(**(known | training)))


def test_hyperparameters_are_those_of_the_optimizer() -> None:
    module = nn.Linear(2, 2)
    found = settings_of(torch.optim.AdamW(module.parameters(), lr=0.5, betas=(0.1, 0.2), eps=1e-3), module, plan())
    assert (found.learning_rate, found.betas, found.epsilon, found.weight_decay) == (0.5, (0.1, 0.2), 1e-3, 1e-2)
    found = settings_of(torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.3), module, plan(optimizer="sgd"))
    assert (found.momentum, found.weight_decay) == (0.3, 0.0)
    groups = [{"params": [module.bias], "weight_decay": 0.0}, {"params": [module.weight], "weight_decay": 0.1}]
    found = settings_of(torch.optim.AdamW(groups), module, plan(), "module.")
    assert (found.weight_decay, found.undecayed) == (0.1, {"module.bias"})
    with pytest.raises(RequestError, match=r"undecayed: unknown parameter 'module.bias'; did you mean bias"):
        found.of_parameters([("weight",), ("bias",)])
    assert found.of_parameters([("head.bias", "module.bias")]).undecayed == {"head.bias"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop: a plan is trained with"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "take AdamW"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1), "plan again with --optimizer sgd"),
        (lambda m: torch.optim.AdamW([m.weight]), "the optimizer lacks bias"),
        (
            lambda m: torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias], "weight_decay": 0.1}]),
            "several values of weight_decay; the runtime has one, and weights without",
        ),
    ],
)
def test_optimizers_that_the_runtime_does_not_have(make: Any, said: str) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(RequestError, match=said):
        settings_of(make(module), module, plan())


def test_clipping_is_that_of_the_plan() -> None:
    clipping = plan(update=Update(clip_norm=0.5))
    check_clipping(0.5, "max_grad_norm", clipping)
    check_clipping(0, "max_grad_norm", plan())
    check_clipping(None, "gradient_clip_val", plan())
    with pytest.raises(RequestError, match=r"the plan clips to 0\.5.*max_grad_norm=0\.5.*--clip-norm 1$"):
        check_clipping(1.0, "max_grad_norm", clipping)
    with pytest.raises(
        RequestError, match=r"the plan does not clip.*max_grad_norm=0, or plan again with --clip-norm 1"
    ):
        check_clipping(1.0, "max_grad_norm", plan())


def test_weights_that_were_let_go_are_no_old_weights() -> None:
    module = nn.Linear(2, 2)
    let_go(module)
    assert [parameter.numel() for parameter in module.parameters()] == [0, 0]
    with pytest.raises(RuntimeError):
        module(torch.zeros(1, 2))


def test_values_come_back_as_they_were_and_run_no_code(tmp_path) -> None:
    file = tmp_path / "values.json"
    value = {"a": [1, (2.5, None)], 3: {"infinite": math.inf}, "best": torch.tensor([1.5, math.inf])}
    found = values_of(as_text(value, file), file)
    assert found["best"].tolist() == [1.5, math.inf]
    assert {key: item for key, item in found.items() if key != "best"} == {
        "a": [1, (2.5, None)],
        3: {"infinite": math.inf},
    }
    with pytest.raises(CheckpointError, match=r"\['rate'\]: a SimpleNamespace cannot be saved"):
        as_text({"rate": SimpleNamespace()}, file)
    for text in ('{"tensor": ["torch.qint8", [1], [1]]}', '{"eval": "1"}', '{"a": 1, "b": 2}', "{"):
        with pytest.raises(CheckpointError, match="is not what training under a plan saved"):
            values_of(text, file)


def test_what_was_saved_last_is_gone_on_from_even_where_saving_was_cut(tmp_path) -> None:
    """A checkpoint of more steps may be left of an earlier training; one that is being written is not there yet."""
    sharded = tmp_path / taking_over.SHARDED

    def saved(step: int, name: str) -> None:
        (sharded / name).mkdir(parents=True)
        progress = Progress(step=step, updates=step, samples=step, seed=0, data={"values": as_text(step, tmp_path)})
        whole = Manifest(
            format_version=FORMAT_VERSION, kind="sliced", progress=progress, optimizer="adamw", files=(), tensors={}
        )
        write_manifest(sharded / name, whole)

    with pytest.raises(CheckpointError, match="has no complete checkpoint of a plan"):
        taking_over.saved_beside(tmp_path)
    saved(9, "step-000009")
    saved(3, ".step-000003.ab.part")
    assert taking_over.saved_beside(tmp_path) == 9
    (sharded / ".step-000003.ab.part").rename(sharded / "step-000003")
    assert taking_over.saved_beside(tmp_path) == 9  # cut before the new one was named: the old one, whole
    write_atomically(tmp_path / taking_over.CURRENT, '{"checkpoint": "step-000003"}')
    assert taking_over.saved_beside(tmp_path) == 3
    write_atomically(tmp_path / taking_over.CURRENT, '{"checkpoint": "../other"}')
    assert taking_over.saved_beside(tmp_path) == 9


class _Step(nn.Module):
    """As much of a LightningModule as is traced."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.returned = returned

    def training_step(self, batch: Any, number: int) -> Any:
        loss = (self.weight * batch["x"]).sum()
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"half": loss / 2})
        return self.returned(loss)


def test_what_a_training_step_logs_is_known() -> None:
    wrapped = TrainingStepModule(_Step(lambda loss: {"loss": loss, "more": 1}))
    assert wrapped(x=torch.ones(2)).item() == 2.0
    assert wrapped.logged.losses == {"loss": {"prog_bar": True}}
    assert wrapped.logged.others == ["half"]
    assert "log" not in vars(wrapped.module)
    with pytest.raises(RequestError, match="returned NoneType; return the loss"):
        TrainingStepModule(_Step(lambda loss: None))(x=torch.ones(2))


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gradient_accumulation_steps": 2}, r"micro-batches of its own \(2\)"),
        ({"bf16": True}, "the plan decides the precision"),
        ({"fsdp": True}, "the plan shards instead"),
        ({"optim": "adafactor"}, "optim='adafactor'"),
        ({"per_device_train_batch_size": 4}, "makes a global batch of 4, and the plan has 8; give per_device_train_"),
        ({"max_grad_norm": 1.0}, "the plan does not clip"),
        ({"label_smoothing_factor": 0.1}, "the loss of the model"),
        ({"methods": ["compute_loss"]}, "Own.compute_loss: put the loss into the model's forward"),
        ({"methods": ["create_optimizer"]}, "Own.create_optimizer: the runtime computes gradients"),
        ({"methods": ["_get_train_sampler"]}, "Own._get_train_sampler: a plan takes samples at random"),
        ({"callbacks": True}, "Looks.on_pre_optimizer_step: is called with gradients"),
    ],
)
def test_arguments_of_the_trainer(tmp_path, changed: dict[str, Any], said: str) -> None:
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'parallel-planner[integrations]'"
    )
    from transformers import TrainerCallback, TrainingArguments

    from runtime.integrations import huggingface

    known = {"per_device_train_batch_size": 8, "max_grad_norm": 0, "use_cpu": True, "report_to": []}
    given = {name: value for name, value in changed.items() if name not in ("methods", "callbacks")}
    arguments = TrainingArguments(output_dir=str(tmp_path), **(known | given))

    class Checked(huggingface.PlanTrainer):
        def __init__(self) -> None:
            self.args, self.plan = arguments, plan()
            self.callback_handler = SimpleNamespace(callbacks=callbacks)

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    callbacks = [Looks()] if "callbacks" in changed else []
    own = {name: lambda self: None for name in changed.get("methods", ())}
    with pytest.raises(RequestError, match=said):
        huggingface._check(type("Own", (Checked,), own)(), {})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"accumulate_grad_batches": 2}, r"micro-batches of its own \(2\)"),
        ({"precision": "bf16-mixed"}, "the plan decides the precision"),
        ({"gradient_clip_val": 1.0}, "the plan does not clip"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips the global norm"),
        ({"limit_val_batches": 1.0}, "validation='val_loss'"),
        (
            {"methods": ["configure_gradient_clipping"]},
            "Own.configure_gradient_clipping: the runtime computes gradients",
        ),
        ({"methods": ["on_before_optimizer_step"]}, "Own.on_before_optimizer_step: the runtime computes and uses up"),
        ({"callbacks": ["WeightAveraging"]}, "WeightAveraging: reads or changes whole weights"),
        ({"callbacks": ["on_after_backward"]}, "Looks.on_after_backward: the runtime computes and uses up"),
    ],
)
def test_settings_of_lightning(changed: dict[str, Any], said: str) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'parallel-planner[integrations]'")
    import lightning
    from lightning.pytorch.callbacks import WeightAveraging

    from runtime.integrations import lightning as ours

    class Module(lightning.LightningModule):
        def validation_step(self, batch: Any) -> None: ...

        def val_dataloader(self) -> Any:
            return []

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    own = {name: lambda self: None for name in changed.get("methods", ())}
    of_theirs = {"WeightAveraging": WeightAveraging}
    callbacks = [
        of_theirs.get(name, type("Looks", (lightning.Callback,), {name: lambda self: None}))()
        for name in changed.get("callbacks", ())
    ]
    given = {name: value for name, value in changed.items() if name != "methods"} | {"callbacks": callbacks}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, **(quiet | {"limit_val_batches": 0} | given))
    trainer.strategy.connect(type("Own", (Module,), own)())
    trainer._data_connector.attach_data(trainer.lightning_module)
    with pytest.raises(RequestError, match=said):
        ours._check(trainer, plan(), None)


@pytest.mark.slow  # imports transformers
def test_arguments_of_the_trainer_are_checked_by_position_too(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'parallel-planner[integrations]'"
    )
    from transformers import TrainingArguments

    from runtime.integrations import huggingface

    monkeypatch.setattr(huggingface, "load_plan", lambda path: plan())
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, max_grad_norm=0, use_cpu=True, report_to=[]
    )
    before = (nn.Linear(2, 2), arguments, None, None, None, None, None)
    with pytest.raises(RequestError, match="compute_loss_func=: a plan trains with the loss of the model"):
        huggingface.PlanTrainer(*before, lambda outputs, labels: outputs, plan="plan.json")


@pytest.mark.slow  # imports transformers
def test_the_trainer_counts_the_tokens_of_a_batch_once() -> None:
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'parallel-planner[integrations]'"
    )
    from runtime.integrations import huggingface

    trainer = huggingface.PlanTrainer.__new__(huggingface.PlanTrainer)
    trainer.args = SimpleNamespace(include_num_input_tokens_seen="all", device="cpu", world_size=4)
    trainer.state, trainer.model = SimpleNamespace(num_input_tokens_seen=5), nn.Linear(2, 2)
    trainer.accelerator = SimpleNamespace(gather=lambda tokens: tokens.repeat(4))
    trainer._track_num_input_tokens({"input_ids": torch.zeros(8, 16)})
    assert trainer.state.num_input_tokens_seen == 5 + 8 * 16


class _FakeStep:
    """A training step that computes nothing, and notes how the module was when it was traced."""

    def __init__(self, planned: nn.Module) -> None:
        self.planned, self.ready, self.traced, self.steps = planned, False, dict[str, bool](), 0
        self.optimizer = SimpleNamespace(learning_rate=0.0)

    def prepare(self, batch: Any) -> None:
        self.ready, self.traced = True, {name: one.training for name, one in self.planned.named_modules()}

    def __call__(self, batch: Any) -> float:
        self.steps += 1
        return 1.0

    def evaluate(self, batch: Any) -> float:
        return 1.0


def _fitted(monkeypatch: pytest.MonkeyPatch, schedule: Any, **trainer: Any) -> _FakeStep:
    """Lightning's own loop with a module whose frozen part evaluates."""
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'parallel-planner[integrations]'")
    import lightning

    from runtime.integrations import lightning as ours

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.linear, self.frozen = nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.5).eval()

        def training_step(self, batch: Any, number: int) -> None: ...

        def validation_step(self, batch: Any, number: int) -> None: ...

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    monkeypatch.setattr(ours, "load_plan", lambda path: plan())
    monkeypatch.setattr(ours, "join_processes", lambda device: None)
    monkeypatch.setattr(ours, "parallelize", lambda planned, *rest, **more: _FakeStep(planned))
    strategy = ours.PlanStrategy("plan.json", validation="val_loss")
    loader = torch.utils.data.DataLoader(torch.zeros(24, 2), batch_size=8)
    made = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **trainer,
    )  # fmt: skip
    made.fit(Module(), loader, loader)
    return strategy.step  # type: ignore[return-value]


def _cycle(optimizer: Any, **more: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, **more)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sanity", [0, 1])
def test_a_module_is_traced_as_it_trains_though_lightning_validates_first(
    monkeypatch: pytest.MonkeyPatch, sanity: int
) -> None:
    def steady(optimizer: Any) -> Any:
        return _cycle(optimizer, cycle_momentum=False)

    step = _fitted(monkeypatch, steady, num_sanity_val_steps=sanity)
    assert step.steps == 3
    assert (step.traced["module.dropout"], step.traced["module.frozen"]) == (True, False)


@pytest.mark.filterwarnings("ignore")
def test_schedules_that_change_more_than_the_rate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RequestError, match=r"betas of the optimizer changed from \(0\.95, 0\.999\).*cycle_momentum=False"
    ):
        _fitted(monkeypatch, _cycle)


def test_a_training_step_that_reads_the_trainer_is_refused() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'parallel-planner[integrations]'")
    import lightning

    class Module(lightning.LightningModule):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            assert self.logger is None
            return batch.sum() * (1 + self.current_epoch)

    module = Module()
    with pytest.raises(RequestError, match="training_step reads current_epoch of the Trainer"):
        TrainingStepModule(module)(torch.ones(2))
    assert module._trainer is None


def test_importing_the_package_imports_neither_library() -> None:
    code = (
        "import sys, runtime.integrations as found;"
        "assert found.__all__ == ['PlanStrategy', 'PlanTrainer', 'as_planned'];"
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_library_that_is_absent_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, package in (("huggingface", "accelerate.data_loader"), ("lightning", "lightning.pytorch.strategies")):
        name = f"runtime.integrations.{module}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(RequestError, match=r"pip install 'parallel-planner\[integrations\]'"):
            importlib.import_module(name)
