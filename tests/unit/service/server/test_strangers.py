"""What somebody does who knows the client and not this service: SmolLM2, adapters, a rate, and nothing else given."""

from __future__ import annotations

from typing import Any

import pytest

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the client's
]
SERVE_OPTIONS = ("--model", "smollm2")
SENTENCE = "The quick brown fox jumps over the lazy dog near Grimsby at 7:42."


@pytest.mark.parametrize("rank, rate", [(8, 1e-3), (16, 1e-3), (32, 1e-3), (16, 3e-4), (16, 3e-3)])
def test_a_sentence_is_learned_by_heart(client: Any, rank: int, rate: float) -> None:
    trained = client.create_lora_training_client(base_model="smollm2", rank=rank)
    tokenizer = trained.get_tokenizer()
    ids = [*tokenizer.encode(SENTENCE), tokenizer.eos_token_id]
    row = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
    losses: list[float] = []
    while len(losses) < 30 and (not losses or losses[-1] >= 0.02):
        done = trained.forward_backward([row], "cross_entropy")
        trained.optim_step(tinker.AdamParams(learning_rate=rate)).result()
        losses.append(done.result().metrics["loss:sum"] / len(ids[1:]))
    print(f"rank {rank}, rate {rate:.0e}: {losses[-1]:.3f} for each token after {len(losses)} steps")
    assert losses[-1] < 0.05
    sampler = trained.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=40, temperature=0)
    (said,) = sampler.sample(tinker.ModelInput.from_ints(ids[:1]), 1, params).result().sequences
    assert tokenizer.decode([ids[0], *said.tokens], skip_special_tokens=True) == SENTENCE
