"""Any split of a batch gives the same update, where transformers alone is off by a third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from etude.data.columns import Columns
from etude.engines.huggingface import BaseTrainer
from tests.unit.engines.huggingface.parts import Weighed, arguments

BATCH, TOKENS, CLASSES = 16, 7, 5


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (BATCH, 1), generator=generator)
    mask = torch.arange(TOKENS) < lengths
    return {"x": x, "y": y, "labels": y.masked_fill(~mask, -100), "mask": mask.double()}


class Tokens(nn.Module):
    """A model of the user's that averages over the tokens that count, as most do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x).transpose(1, 2), labels)}


class WeighedDictionary(BaseTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        losses = nn.functional.cross_entropy(model(inputs["x"]).transpose(1, 2), inputs["y"], reduction="none")
        weight = inputs["mask"].sum()
        return {"loss": (losses * inputs["mask"]).sum() / weight, "weight": weight}


class PlainMean(BaseTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(inputs["x"]).square().mean()


def train(kind: Any, model: nn.Module, directory: Path, micro: int, columns: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights after two steps of plain gradient descent over the whole data."""
    rows = {name: value for name, value in sequences().items() if name in columns}
    options = {"max_steps": 2, "gradient_accumulation_steps": BATCH // micro, "optim": "sgd", "learning_rate": 0.1}
    args = arguments(directory, **options, lr_scheduler_type="constant", remove_unused_columns=False)
    if issubclass(kind, BaseTrainer):
        trainer = kind(model=model, args=args, train_loader=DataLoader(Columns(rows), batch_size=micro))
    else:
        args.per_device_train_batch_size = micro
        samples = [{name: value[i] for name, value in rows.items()} for i in range(BATCH)]
        trainer = kind(model=model, args=args, train_dataset=samples)
        trainer._train_batch_size = micro
        trainer._get_train_sampler = torch.utils.data.SequentialSampler
    trainer.train()
    return dict(model.state_dict())


def net() -> nn.Module:
    return Tokens().net


def update_error(split: dict[str, Tensor], whole: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far the update is off, relative to the update."""
    apart = sum(float((split[k] - whole[k]).square().sum()) for k in whole)
    moved = sum(float((whole[k] - start[k]).square().sum()) for k in whole)
    return (apart / moved) ** 0.5


CASES = [
    pytest.param(Weighed, net, ("x", "y", "mask"), id="loss"),
    pytest.param(WeighedDictionary, net, ("x", "y", "mask"), id="dictionary-with-weight"),
    pytest.param(PlainMean, net, ("x", "y"), id="mean"),
    pytest.param(BaseTrainer, Tokens, ("x", "labels"), id="labels"),
]


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 4, 8])
@pytest.mark.parametrize("kind, make_model, columns", CASES)
def test_every_split_gives_the_update_of_the_whole_batch(
    kind: Any, make_model: Any, columns: tuple[str, ...], micro: int, tmp_path: Path
) -> None:
    start = {name: value.clone() for name, value in make_model().state_dict().items()}
    whole = train(kind, make_model(), tmp_path, BATCH, columns)
    split = train(kind, make_model(), tmp_path, micro, columns)
    assert update_error(split, whole, start) < 1e-12


@pytest.mark.slow
def test_transformers_alone_is_off(tmp_path: Path) -> None:
    start = {name: value.clone() for name, value in Tokens().state_dict().items()}
    whole = train(transformers.Trainer, Tokens(), tmp_path, BATCH, ("x", "labels"))
    split = train(transformers.Trainer, Tokens(), tmp_path, 1, ("x", "labels"))
    assert update_error(split, whole, start) > 0.05
    ours = train(BaseTrainer, Tokens(), tmp_path, BATCH, ("x", "labels"))
    assert update_error(ours, whole, start) < 1e-12, "where there is nothing to split, both agree"


def language_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


class Unaware(BaseTrainer):
    """Overrides compute_loss without the number of items, which transformers then believes it has used."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BaseTrainer, Unaware])
def test_a_language_model_of_transformers_is_exact_too(kind: type[BaseTrainer], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (BATCH, 8), generator=generator)
    lengths = torch.randint(2, 9, (BATCH, 1), generator=generator)
    rows = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) >= lengths, -100)}
    found = []
    for micro in (BATCH, 4, 1):
        model = language_model()
        options = {"max_steps": 2, "gradient_accumulation_steps": BATCH // micro, "optim": "sgd", "learning_rate": 0.1}
        args = arguments(tmp_path, **options, max_grad_norm=0.0)
        kind(model=model, args=args, train_loader=DataLoader(Columns(rows), batch_size=micro)).train()
        found.append(dict(model.state_dict()))
    start = dict(language_model().state_dict())
    # transformers computes the loss of a language model in float32, whatever the weights are.
    assert max(update_error(split, found[0], start) for split in found[1:]) < 1e-6
