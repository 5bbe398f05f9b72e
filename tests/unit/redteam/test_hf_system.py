"""Language models as a system: what was sampled is kept, and nothing but the auditor learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import ConfigError
from etude.policies.language.sampling import Sampling
from etude.redteam.hf_system import HFASTSystem
from etude.redteam.sampler import ASTSampler
from etude.rollouts.system import ValueFunctionSystem
from tests.unit.redteam.tiny_models import LETTERS, PROMPTS, Share, make_sampler, make_system, tiny


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_tokens_and_log_probabilities_are_those_of_the_sampling_model(temperature: float) -> None:
    sampler = make_sampler(auditor_sampling={"max_new_tokens": 5, "temperature": temperature})
    system = sampler.system
    for node in sampler.rollout(0).nodes():
        kept = node.extra["auditor"]
        assert system.auditor.decode(kept["tokens"]) == node.probe
        assert system.auditor.decode(node.extra["target"]["tokens"]) == node.response
        with torch.no_grad():
            again = system.auditor_logprobs([kept["prompt"]], [kept["tokens"]])
        assert again[0].tolist() == pytest.approx(kept["logprobs"], abs=1e-5)


def test_rows_of_different_lengths_are_padded_with_nought_and_do_not_see_the_padding() -> None:
    system = make_system()
    contexts, probes = ["a", "a bad cafe", "i hide"], ["bad", "b", "a big idea"]
    together = system.get_auditor_logprobs(contexts, probes)
    assert together.shape == (3, 10)
    for row, context, probe in zip(together, contexts, probes):
        alone = system.get_auditor_logprobs([context], [probe])
        torch.testing.assert_close(row[: len(probe)], alone[0])
        assert not row[len(probe) :].any()


def test_log_probabilities_agree_with_the_plain_model() -> None:
    system = make_system()
    ids = torch.tensor([system.auditor.encode("i hide a big idea")])
    with torch.no_grad():
        logits = system.auditor.model(ids).logits[0].log_softmax(-1)
    expected = [float(logits[at - 1, ids[0, at]]) for at in range(7, ids.shape[1])]
    assert system.get_auditor_logprobs(["i hide "], ["a big idea"])[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_likelihood_is_a_perplexity_and_does_not_depend_on_length() -> None:
    system = make_system(likelihood_weight=1.0, combined_weight=0.0, response_weight=0.0)
    contexts, probes = ["a bad", "a bad"], ["ab", "abababab"]
    log_probs = system.get_target_logprobs(contexts, probes)
    means = [float(log_probs[0, :2].mean()), float(log_probs[1, :8].mean())]
    for (reward, parts), mean in zip(system.assess(contexts, probes, ["", ""]), means):
        assert parts["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-5)
        assert reward == parts["likelihood"] == pytest.approx(mean, rel=1e-5)
    capped = make_system(likelihood_weight=1.0, combined_weight=0.0, response_weight=0.0, max_perplexity=2.0)
    assert capped.reward(contexts, probes, ["", ""]) == pytest.approx([-math.log(2)] * 2)
    silent, spoken = system.reward(["a", "a"], ["", "be"], ["b", "b"])
    assert silent < spoken, "to say nothing does not pay"
    assert system.assess(["a"], [""], ["b"])[0][1]["perplexity"] == pytest.approx(1e4)


def test_the_reward_is_the_weighted_sum() -> None:
    system = make_system(likelihood_weight=0.5, combined_weight=2.0, response_weight=3.0)
    ((reward, parts),) = system.assess(["a"], ["be"], ["ee"])
    assert parts["combined_score"] == 0.75 and parts["response_score"] == 1.0
    assert reward == pytest.approx(0.5 * parts["likelihood"] + 2.0 * 0.75 + 3.0)
    unlikely = make_system(likelihood_weight=0.0)
    assert "perplexity" not in unlikely.assess(["a"], ["be"], ["ee"])[0][1], "a pass that has no weight is not made"


def test_target_and_baseline_never_build_a_graph() -> None:
    system = make_system(baseline=tiny(2))
    probes = ["bad", "idea"]
    assert not system.get_target_logprobs(["a", "b"], probes).requires_grad
    assert not system.get_baseline_logprobs(["a", "b"], probes).requires_grad
    loss = system.auditor_logprobs(["a", "b"], probes).sum()
    (loss - system.baseline_logprobs(["a", "b"], probes).sum() - system.target_logprobs(["a"], ["b"]).sum()).backward()
    assert any(p.grad is not None for p in system.auditor.parameters())
    frozen = [*system.target.parameters(), *system.baseline.parameters()]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.parametrize("lora", [None, 4])
def test_without_a_baseline_the_auditor_is_compared_with_itself_before_training(lora: int | None) -> None:
    system = make_system(auditor=tiny(0, lora=lora))
    before = system.get_auditor_logprobs(["a"], ["bad"]).detach()
    with torch.no_grad():
        for parameter in system.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert not torch.allclose(system.get_auditor_logprobs(["a"], ["bad"]), before, atol=1e-3)
    torch.testing.assert_close(system.get_baseline_logprobs(["a"], ["bad"]), before)


def test_contexts_are_cut_to_the_window_of_each_model() -> None:
    system = make_system(auditor=tiny(0, context=24), target=tiny(1, context=16))
    sampler = ASTSampler(system, ["a bad cafe " * 5], 2, 3)
    for node in sampler.rollout(0).nodes():
        assert len(node.extra["auditor"]["prompt"]) == 24 - 4
        assert len(node.extra["target"]["prompt"]) == 16 - 3
        assert math.isfinite(node.reward)
    with pytest.raises(ConfigError, match="leaves no room"):
        ASTSampler(make_system(auditor=tiny(0, context=4)), PROMPTS).rollout(0)


def test_an_empty_prompt_begins_somewhere() -> None:
    assert ASTSampler(make_system(), [""], 1, 1).rollout(0).children[0].probe


def test_models_with_different_tokenizers_understand_each_other() -> None:
    system = make_system(target=tiny(1, LETTERS[::-1] + "xyz"), baseline=tiny(2, LETTERS[::-1]))
    node = ASTSampler(system, PROMPTS, 1, 1).rollout(0).children[0]
    kept = node.extra["auditor"]
    for ask in (system.get_target_logprobs, system.get_baseline_logprobs):
        by_tokens, by_text = ask([kept["prompt"]], [kept["tokens"]]), ask([node.context], [node.probe])
        torch.testing.assert_close(by_tokens, by_text)
    assert system.auditor.encode("abc") != system.target.encode("abc")


def test_special_tokens_begin_a_text_and_never_stand_in_its_middle() -> None:
    system = make_system()
    from tokenizers.processors import TemplateProcessing

    for model in (system.auditor, system.target):
        end = model.eos_token_id
        model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", end)]
        )
    assert system.auditor.encode("ab")[0] == system.auditor.eos_token_id
    assert system._continuation_tokens(system.auditor, "ab") == system.auditor.encode("ab")[1:]
    assert system.get_target_logprobs(["ab"], ["cd"]).shape == (1, 2)


def test_each_model_is_on_its_own_device() -> None:
    system = make_system(baseline=tiny(2), devices={"target": "meta", "tester": "cpu"})
    assert (system.auditor.device.type, system.target.device.type, system.baseline.device.type) == (
        "cpu", "meta", "cpu",
    )  # fmt: skip
    assert make_system(devices="cpu").target.device.type == "cpu"
    with pytest.raises(ConfigError, match=r"unknown model 'targte'; did you mean"):
        make_system(devices={"targte": "cpu"})


def test_paths_and_both_names_of_the_auditor_work(tmp_path: Path) -> None:
    tiny(3).save_pretrained(tmp_path / "model")
    system = HFASTSystem(tester=str(tmp_path / "model"), target=tmp_path / "model", scorer=Share(), value_head=True)
    assert system.tester is system.auditor and system.tokenizer is system.auditor.tokenizer
    assert isinstance(system, ValueFunctionSystem) and system.has_values
    contexts, probes = ["a bad"], ["cafe"]
    ours, theirs = system.get_tester_logprobs(contexts, probes), system.get_target_logprobs(contexts, probes)
    torch.testing.assert_close(ours, theirs)
    assert len(system.rollout_prompt_with_tester(["a", "b"])) == 2
    system.auditor.save_pretrained(tmp_path / "final_ckpt")
    system.tokenizer.save_pretrained(tmp_path / "final_ckpt")
    again = HFASTSystem(tmp_path / "final_ckpt", tmp_path / "model", scorer=Share(), baseline=tmp_path / "model")
    assert again.baseline is again.target, "one copy serves as both"
    torch.testing.assert_close(
        again.get_auditor_logprobs(contexts, probes), system.get_auditor_logprobs(contexts, probes)
    )


def test_values_come_from_the_value_head_and_belong_to_the_same_tokens() -> None:
    system = make_system()
    with torch.no_grad():
        system.auditor.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    contexts, probes = ["a bad", "i"], ["cafe", "be"]
    log_probs, values = system.logprobs_and_values(contexts, probes)
    torch.testing.assert_close(log_probs, system.get_auditor_logprobs(contexts, probes))
    torch.testing.assert_close(values, system.value(contexts, probes))
    assert values[1, :2].all() and not values[1, 2:].any()
    ids = torch.tensor([system.auditor.encode("a badcafe")])
    hidden = system.auditor.model.base_model(ids).last_hidden_state[0]
    torch.testing.assert_close(values[0], system.auditor.value_head(hidden[4:8]).squeeze(-1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"auditor": None}, "needs an auditor"),
        ({"auditor_sampling": {"max_tokens": 3}}, "unknown parameter 'max_tokens'"),
        ({"lora": 4}, "give them to LanguageModel"),
        ({"max_perplexity": 0.5}, "at least 1"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_system(**options)


def test_the_auditor_is_not_its_own_target() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match="cannot be its own target"):
        HFASTSystem(model, model, scorer=Share())


def test_generation_settings_are_parameters() -> None:
    sampler = make_sampler(auditor_sampling=Sampling(max_new_tokens=2), target_sampling={"greedy": True})
    nodes = list(sampler.rollout(0).nodes())
    assert all(len(node.extra["auditor"]["tokens"]) <= 2 for node in nodes)
    assert max(len(node.extra["target"]["tokens"]) for node in nodes) > 3
