"""A LightningModule, trained by Lightning alone and under a plan. Imported where Lightning is there."""

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runtime.integrations import PlanStrategy, as_planned

STEPS, SAVED, BATCH = 6, 3, 8


class Words(lightning.LightningModule):
    """Two residual blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)])
        self.head = nn.Linear(32, 64)

    def loss(self, batch: Any) -> torch.Tensor:
        read, follows = batch
        x = self.rows(read)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), follows.flatten())

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss(batch), on_epoch=True)

    def configure_optimizers(self) -> Any:
        biases = [weight for name, weight in self.named_parameters() if name.endswith("bias")]
        others = [weight for name, weight in self.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4)  # small gradients are rounding
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples(count: int) -> TensorDataset:
    tokens = torch.randint(0, 64, (count, 9), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def planned() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What the plan is made for."""
    return as_planned(Words()), samples(BATCH).tensors


class Losses(Callback):  # type: ignore[misc]
    """Notes the loss of every step, and that on validation batches."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append((trainer.global_step, found["train_loss"], found.get("val_loss")))


def trainer_of(folder: str, plan: str | None, **options: Any) -> lightning.Trainer:
    how = {} if plan is None else {"strategy": PlanStrategy(plan, validation="val_loss")}
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, default_root_dir=folder, logger=False, gradient_clip_val=0.5,
        val_check_interval=STEPS - 1, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        **how, **options,
    )  # fmt: skip


def validated(trainer: lightning.Trainer, module: Words, checkpoint: str | None = None) -> list[float]:
    """The loss on validation batches, of the weights that were trained or of those of a checkpoint."""
    (found,) = trainer.validate(module, DataLoader(samples(2 * BATCH), batch_size=BATCH), checkpoint, verbose=False)
    return [found["val_loss"]]


def fitted(folder: str, plan: str | None, resumed: bool, **options: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses by step, and the weights at the end. Saves after step `SAVED`, or goes on from there. The last rows are of
    validation alone: of these weights, and where it went on of those that were saved."""
    lightning.seed_everything(0, verbose=False)
    losses = Losses()
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVED, save_top_k=-1, save_last=True)
    trainer = trainer_of(folder, plan, callbacks=[losses, saving], **options)
    saved = str(Path(folder) / f"epoch=0-step={SAVED}.ckpt") if resumed else None
    training = DataLoader(samples(BATCH * (STEPS - 1)), batch_size=BATCH, shuffle=True)
    trainer.fit(Words(), training, DataLoader(samples(2 * BATCH), batch_size=BATCH), ckpt_path=saved)
    strategy = trainer.strategy
    weights = trainer.lightning_module.state_dict() if plan is None else strategy.full_state_dict()
    losses.rows.append(validated(trainer, trainer.lightning_module))
    if saved is not None:
        losses.rows.append(validated(trainer_of(folder, plan, enable_checkpointing=False), Words(), saved))
    return losses.rows, {name: weight.clone() for name, weight in weights.items()}


def reduced(plan: str) -> tuple[float, float]:
    """The mean of the ranks of all processes, and that of a group of this process alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank, strategy = torch.tensor(float(dist.get_rank())), PlanStrategy(plan)
    return float(strategy.reduce(rank)), float(strategy.reduce(rank, groups[dist.get_rank()]))
