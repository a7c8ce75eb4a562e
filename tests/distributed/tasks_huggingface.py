"""A model of transformers, trained by its Trainer alone and under a plan. Imported where accelerate is there."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset
from transformers import AutoConfig, Trainer, TrainingArguments, set_seed

from planner import StackedSamples
from runtime.integrations import PlanTrainer

STEPS, SAVED, BATCH, LENGTH = 6, 3, 8, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Tokens at random; four samples more than five global batches."""

    def __init__(self, count: int = 5 * BATCH + 4) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


class Translations(Sentences):
    """The same for an encoder and a decoder."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        made = super().__getitem__(number)
        return {**made, "decoder_input_ids": made["labels"].roll(1), "labels": made["labels"].flip(0)}


def config_file(folder: Path, content: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder / "config.json"


def arguments(folder: str, **changed: Any) -> TrainingArguments:
    """Those of a script of a user, here and under the plan."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    own = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH // world, "per_device_eval_batch_size": BATCH // world,
        "max_steps": STEPS, "logging_steps": 1, "save_steps": SAVED, "eval_strategy": "steps", "eval_steps": SAVED,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5, "use_cpu": True, "dataloader_drop_last": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "steps",
    }  # fmt: skip
    return TrainingArguments(**(own | changed))


def stacked() -> tuple[torch.nn.Module, tuple[()], dict[str, torch.Tensor]]:
    """What a plan of stacked samples is made for."""
    config = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return StackedSamples(transformers.LlamaForCausalLM(config)), (), {"input_ids": tokens, "labels": tokens}


def fitted(
    folder: str, config: str, plan: str | None, resumed: bool, samples: str = ""
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses, gradient norms and learning rates by step, with evaluation before and behind, and the weights at the end.
    Saves after step `SAVED`, or goes on from there. The model takes `samples` that are "stacked"."""
    with_launcher(dist.is_initialized())
    set_seed(0)
    read = AutoConfig.from_pretrained(config)
    kind, data = getattr(transformers, read.architectures[0]), Translations if read.is_encoder_decoder else Sentences
    model = kind._from_config(read).train()
    given = {
        "model": StackedSamples(model) if samples else model,
        "args": arguments(folder),
        "train_dataset": data(),
        "eval_dataset": data(BATCH),
    }
    trainer = Trainer(**given) if plan is None else PlanTrainer(plan=plan, **given)
    begun = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}") if resumed else None)
    trainer.evaluate()
    trainer.save_model(folder)
    kept = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
    rows = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history]
    rows.append({"eval_loss": begun})
    if plan is not None:
        dist.barrier()  # the first process writes
    return rows, kind.from_pretrained(folder).state_dict()


def with_launcher(several: bool) -> None:
    """What torchrun would have set, which accelerate reads, and nothing that it knows from before."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if several:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
