"""Let agents work on tasks with a policy, all at once, and make trajectories of what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from etude.errors import DataError
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import fold
from etude.rollouts.agents import Run, settle
from etude.rollouts.conversation import begin
from etude.rollouts.coordinator import Ask, Ended, run_together
from etude.rollouts.llm import LLM, Reply, Request
from etude.rollouts.transcript import Transcript, encode_prompt
from etude.types.trajectory import Trajectory

Generate = Callable[[Sequence[list[int]], Sequence[int], Sampling], list[list[Completion]]]
"""From prompts, their keys and how to draw to completions."""


def act(
    make_run: Callable[[], Run],
    policy: Any,
    transcripts: Sequence[Transcript],
    generate: Generate,
    sampling: Sampling,
    *,
    max_turns: int,
    timeout_s: float | None = None,
    glance: Callable[[], None] | None = None,
) -> list[Trajectory]:
    """Return the trajectories of agents, one agent to each transcript; those of an agent that failed have no reward.

    Args:
        make_run: Gives the function that one agent is.
        policy: Knows how prompts are encoded.
        transcripts: Empty ones, which say what each agent works on, in order.
        generate: Completes the prompts of a level.
        sampling: How to draw, unless an agent asks for something else.
        max_turns: Completions of one agent at most.
        timeout_s: Seconds of its own that each agent may take; None is no limit.
        glance: Called a few times a second while waiting; may raise.
    """

    def work(transcript: Transcript) -> Callable[[Ask], Any]:
        return lambda ask: make_run()(transcript.task, LLM(ask, sampling, transcript.key >> 1, max_turns))

    def answer(asked: list[tuple[int, Request]]) -> list[Any]:
        return _answer([(transcripts[number], request) for number, request in asked], policy, generate)

    ended = run_together([work(transcript) for transcript in transcripts], answer, timeout_s, glance)
    return [one for pair in zip(transcripts, ended, strict=True) for one in _settled(policy, *pair)]


def _answer(asked: Sequence[tuple[Transcript, Request]], policy: Any, generate: Generate) -> list[Any]:
    """Return a reply to each request, or the error to raise in its agent; those drawn alike are drawn together."""
    replies: dict[int, Any] = {}
    alike: dict[Sampling, list[tuple[int, list[int]]]] = {}
    for place, (transcript, request) in enumerate(asked):
        try:
            tokens = transcript.encode(policy, request.prompt)
            _require_room(policy, tokens, request.sampling)
        except Exception as error:  # noqa: BLE001 - agents ask with anything; it is theirs to mend
            replies[place] = error
        else:
            alike.setdefault(request.sampling, []).append((place, tokens))
    for sampling, prompts in alike.items():
        keys = [fold(asked[place][0].key, asked[place][1].turn) >> 1 for place, _ in prompts]
        drawn = generate([tokens for _, tokens in prompts], keys, sampling)
        for (place, tokens), (completion,) in zip(prompts, drawn, strict=True):
            transcript, request = asked[place]
            transcript.add(policy, request, tokens, completion)
            said: list[float] | None = completion.logprobs
            logprobs = None if said is None else list(said)
            replies[place] = Reply(
                completion.text, list(completion.tokens), logprobs, completion.finish_reason, tokens
            )  # fmt: skip
    return [replies[place] for place in range(len(asked))]


def _require_room(policy: Any, tokens: Sequence[int], sampling: Sampling) -> None:
    config = getattr(getattr(policy, "causal", None), "config", None)
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and len(tokens) + sampling.max_new_tokens > room:
        raise DataError(
            f"the prompt has {len(tokens)} tokens, which with max_tokens={sampling.max_new_tokens} exceeds the model's "
            f"context of {room}"
        )


def _settled(policy: Any, transcript: Transcript, ended: Ended) -> list[Trajectory]:
    error = ended.error
    if error is None and not transcript.trajectories:
        error = "it ended without a completion to learn from"
    if error is None:
        try:
            settle(transcript.trajectories, transcript.trained, ended.result)
        except (ValueError, TypeError, AttributeError) as problem:
            error = str(problem)
    if error is None:
        return transcript.trajectories
    task = transcript.task
    last = transcript.trajectories[-1:] or [
        begin(
            task, encode_prompt(policy, task.messages or task.prompt), transcript.key,
            group_id=transcript.group_id, run_id=transcript.run_id,
        )
    ]  # fmt: skip
    last[0].reward, last[0].error = None, f"the agent failed: {error}"
    return last
