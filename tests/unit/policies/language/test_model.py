"""What a language policy is made of: sources, adapters, the value head, its reference, and what a checkpoint holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.errors import CheckpointError, ConfigError
from etude.policies.language import LanguageModel, Lora, Sampling, language_model
from etude.policies.language.llama import LlamaDecoder
from etude.registry import POLICY_REGISTRY
from etude.types import Batch

from .samples import SMALL, make_batch, pairs_of, plain_log_probs

PAIRS = [([5, 6, 7, 8], [9, 10, 0]), ([5, 6, 7, 8], [11, 12]), ([20, 21], [22, 23])]


def train(policy: LanguageModel, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([value for value in policy.parameters() if value.requires_grad], lr=1e-2)
    policy.train()
    for _ in range(steps):
        optimizer.zero_grad()
        policy(make_batch(PAIRS)).total.backward()
        optimizer.step()


def test_weights_follow_from_the_seed() -> None:
    one, same, other = (LanguageModel.tiny(**SMALL, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_seed_that_is_not_given_follows_the_global_generator() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(LanguageModel.tiny(**SMALL, seed=None, lora=2))
    assert all(torch.equal(a, b) for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True))


def test_the_tiny_model_is_tiny() -> None:
    assert 100_000 < sum(value.numel() for value in LanguageModel.tiny().parameters()) < 900_000


def test_characters_come_back(tmp_path: Path) -> None:
    policy = LanguageModel.tiny("ab \n1", **SMALL)
    tokens = policy.encode("ba 1\n?")
    assert len(tokens) == 6 and policy.decode(tokens[:5]) == "ba 1\n"
    assert len(policy.tokenizer) == 7


def test_training_learns_and_the_reference_stays() -> None:
    policy = LanguageModel.tiny(**SMALL)
    batch = make_batch(PAIRS)
    before = policy.log_probs(batch).detach()
    train(policy)
    assert policy.log_probs(batch).sum() > before.sum() + 1
    with policy.reference() as reference:
        found = reference.log_probs(batch)
        assert not found.requires_grad
    assert torch.equal(found, before)
    names = [name for name, _ in policy.named_parameters()]
    assert not [name for name in [*names, *policy.state_dict()] if "reference" in name]


def test_the_reference_is_the_model_before_training_even_after_loading_a_checkpoint() -> None:
    policy = LanguageModel.tiny(**SMALL)
    batch = make_batch(PAIRS)
    before = policy.log_probs(batch).detach()
    train(policy)
    resumed = LanguageModel.tiny(**SMALL)
    resumed.load_state_dict(policy.state_dict())
    with resumed.reference() as reference:
        assert torch.equal(reference.log_probs(batch), before)


def test_a_wrapped_model_without_a_source_is_its_own_first_reference() -> None:
    inner = LanguageModel.tiny(**SMALL)
    policy = LanguageModel(inner.model, inner.tokenizer)
    batch = make_batch(PAIRS)
    before = policy.log_probs(batch).detach()
    with policy.reference() as reference:
        assert torch.equal(reference.log_probs(batch), before)
    train(policy)
    with policy.reference() as reference:
        assert torch.equal(reference.log_probs(batch), before)


def test_lora_trains_adapters_alone_and_its_reference_is_the_base() -> None:
    base, policy = LanguageModel.tiny(**SMALL), LanguageModel.tiny(**SMALL, lora=4)
    batch = make_batch(PAIRS)
    before = base.log_probs(batch).detach()
    frozen = {name: value.clone() for name, value in policy.named_parameters() if not value.requires_grad}
    assert torch.allclose(policy.log_probs(batch), before)  # adapters start at nothing
    train(policy, 5)
    assert all(torch.equal(value, frozen[name]) for name, value in policy.named_parameters() if name in frozen)
    assert policy.log_probs(batch).sum() > before.sum() + 0.5
    with policy.reference() as reference:
        found = reference.log_probs(batch)
        assert not found.requires_grad and torch.allclose(found, before)
    trained = [name for name, value in policy.named_parameters() if value.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_generation_with_adapters_uses_them() -> None:
    policy = LanguageModel.tiny(**SMALL, lora={"rank": 4, "alpha": 16})
    train(policy, 5)
    assert isinstance(policy._decoder(), LlamaDecoder)
    prompts = ["ab", "cde"]
    groups = policy.generate(prompts, Sampling(max_new_tokens=6), n=2)
    batch = make_batch(pairs_of(policy, prompts, groups))
    found = policy.log_probs(batch)[batch["loss_mask"].bool()]
    sampled = torch.tensor([value for group in groups for one in group for value in one.logprobs])
    assert torch.allclose(found, sampled, atol=1e-4)
    with policy.reference() as reference:
        plain = reference.generate(prompts, Sampling(max_new_tokens=6, greedy=True))
    assert plain == LanguageModel.tiny(**SMALL).generate(prompts, Sampling(max_new_tokens=6, greedy=True))


def test_a_checkpoint_holds_what_is_trained_once() -> None:
    full = LanguageModel.tiny(**SMALL, value_head=True)
    names = set(full.state_dict())
    assert "model.model.embed_tokens.weight" in names and "model.lm_head.weight" not in names
    assert {"value_head.weight", "value_head.bias"} <= names
    adapted = LanguageModel.tiny(**SMALL, value_head=True, lora=2)
    assert all("lora_" in name or name.startswith("value_head") for name in adapted.state_dict())
    train(adapted)
    again = LanguageModel.tiny(**SMALL, value_head=True, lora=2)
    again.load_state_dict(adapted.state_dict())
    batch = make_batch(PAIRS)
    assert torch.equal(again.log_probs(batch), adapted.log_probs(batch))
    with pytest.raises(RuntimeError, match="Missing"):
        again.load_state_dict({})


@pytest.mark.parametrize("lora", [None, 4])
def test_a_saved_directory_is_a_plain_hugging_face_one(tmp_path: Path, lora: int | None) -> None:
    import transformers

    policy = LanguageModel.tiny(**SMALL, lora=lora, value_head=True)
    train(policy)
    assert policy.value_head is not None
    torch.nn.init.constant_(policy.value_head.weight, 0.25)
    policy.save_pretrained(tmp_path)
    batch = make_batch(PAIRS)
    wanted = policy.log_probs(batch, with_values=True)
    loaded = LanguageModel.from_pretrained(tmp_path, value_head=True)
    found = loaded.log_probs(batch, with_values=True)
    assert torch.allclose(found.log_probs, wanted.log_probs, atol=1e-5)
    assert torch.allclose(found.values, wanted.values, atol=1e-5) and found.values.abs().sum() > 0
    assert loaded.encode("ab 1\n") == policy.encode("ab 1\n")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(plain_log_probs(theirs, batch), wanted.log_probs, atol=1e-5)


def test_every_batch_will_do() -> None:
    policy = LanguageModel.tiny(**SMALL)
    batch = make_batch(PAIRS)
    assert torch.equal(policy.log_probs(Batch(values=dict(batch))), policy.log_probs(batch))


def test_the_trainer_trains_and_resumes_it(tmp_path: Path) -> None:
    def fit(directory: Path, steps: int) -> dict[str, Any]:
        config = TrainingConfiguration(training_steps=steps, batch_size=3, save_every=2, seed=0)
        policy = LanguageModel.tiny(**SMALL)
        rows = make_batch(PAIRS)
        Trainer(policy, rows, config=config, run=directory, loggers=[], show_progress=False).fit()
        return dict(policy.state_dict())

    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "parts", 2)
    resumed = fit(tmp_path / "parts", 4)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_the_registry_builds_it_from_plain_values() -> None:
    make = POLICY_REGISTRY.get("language")
    policy = make(tiny={"vocabulary": "0123456789+=", **SMALL}, lora={"rank": 2}, value_head=True, seed=1, max_rows=8)
    assert isinstance(policy, LanguageModel) and policy.is_lora and policy.value_head is not None
    assert policy.max_rows == 8 and len(policy.tokenizer) == 14
    assert isinstance(make(tiny=True), LanguageModel)


@pytest.mark.parametrize(
    "params, message",
    [
        ({}, "needs one of path"),
        ({"path": "x", "tiny": True}, "needs one of path"),
        ({"tiny": {"hiden_size": 8}}, "did you mean 'hidden_size'"),
        ({"tiny": {"hidden_size": 30}}, "multiple of its heads"),
        ({"tiny": True, "lora": {"rnk": 8}}, "did you mean 'rank'"),
        ({"tiny": True, "lora": 0}, "rank must be at least 1"),
        ({"tiny": True, "dtype": "float31"}, "float31"),
    ],
)
def test_wrong_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        language_model(**params)


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load a language model"):
        LanguageModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="cannot load a language model"):
        LanguageModel.from_pretrained("nobody/no-such-model")


def test_a_broken_value_head(tmp_path: Path) -> None:
    LanguageModel.tiny(**SMALL).save_pretrained(tmp_path)
    (tmp_path / "value_head.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="value head"):
        LanguageModel.from_pretrained(tmp_path, value_head=True)


def test_adapters_from_a_configuration() -> None:
    assert Lora.of(None) is None and Lora.of(False) is None
    assert Lora.of(True) == Lora() and Lora.of(8) == Lora(rank=8)
    assert Lora.of({"rank": 2, "targets": ["q_proj"]}) == Lora(rank=2, targets=["q_proj"])


def test_checking_a_configuration_imports_no_transformers() -> None:
    program = (
        "import sys\n"
        "from etude.registry import POLICY_REGISTRY\n"
        "found = POLICY_REGISTRY.describe('language')\n"
        "assert [p.name for p in found.parameters][:4] == ['path', 'gguf', 'tiny', 'lora'], found\n"
        "assert all(p.help for p in found.parameters) and found.summary\n"
        "from etude.policies.language import Sampling\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
