"""Plans under the training loops of other libraries: Hugging Face's Trainer and Lightning's.

    from runtime.integrations import PlanTrainer            # in the place of transformers.Trainer
    trainer = PlanTrainer(plan="plan.json", model=model, args=arguments, train_dataset=dataset)

    from runtime.integrations import PlanStrategy           # a strategy of Lightning
    trainer = lightning.Trainer(strategy=PlanStrategy("plan.json"), accelerator="cpu", devices=2)

The loop stays the library's: epochs, callbacks, logging, learning rates, when to evaluate and to save. Losses,
gradients, the optimizer and checkpoints are the runtime's, so the plan decides what is computed.

Importing this package imports neither library; its names do when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.integrations.huggingface import PlanTrainer
    from runtime.integrations.lightning import PlanStrategy, as_planned

__all__ = ["PlanStrategy", "PlanTrainer", "as_planned"]

_HOMES = {
    "PlanStrategy": "runtime.integrations.lightning",
    "PlanTrainer": "runtime.integrations.huggingface",
    "as_planned": "runtime.integrations.lightning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime.integrations' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
