"""What the model wrote, for people to read: a few completions of a few steps, and a few prompts all the way through.

Which steps and which completions is a function of (seed, step) and of what was written, not of ranks nor of when a run
was interrupted. Shown are the steps 1 to 8, and then four between each power of two and the next: some 40 in the first
thousand, 80 in the first million. So what is kept stays small, however long the run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from etude.algorithms.moments import Gather
from etude.rng import fold
from etude.rollouts.graph import Graph
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory

FOLLOWED = 3
"""Prompts whose answers are kept whenever they come by, once in each stretch between two shown steps."""
LONGEST_PROMPT, LONGEST_TEXT, MOST_TURNS = 1000, 2000, 12
"""Characters that are kept of a prompt and of a completion, and turns of a conversation."""

Row = dict[str, Any]


def last_shown(step: int) -> int:
    """Return the latest step up to this one, counted from 1, whose completions are shown."""
    unit = 1 << max(0, step.bit_length() - 3)
    return step // unit * unit


def holds_text(completed: Sequence[Any], policy: Any) -> bool:
    """Tell whether rollouts may hold text. What there is none of on this rank may, for others may have some."""
    if not completed or isinstance(completed[0], Graph):
        return True
    first = completed[0]
    return isinstance(first, Trajectory) and ("text" in first or (first.tokens is not None and _can_decode(policy)))


class Transcripts:
    """Chooses what is worth keeping of each step's rollouts; all ranks call together, and choose the same."""

    def __init__(self, seed: int, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin, or go on from the rows that were kept before."""
        self.seed = seed
        self.followed: dict[str, int] = {}
        """The prompts that are followed, and the shown step whose stretch each was last kept in."""
        self.last = 0
        """The last step of which anything was kept."""
        for row in kept:
            self._remember(row)

    def choose(
        self, step: int, completed: Sequence[Any], experience: Any, policy: Any, gather: Gather, is_last: bool = False
    ) -> list[Row]:
        """Return the rows to keep of a step, counted from 1, over all ranks.

        Args:
            step: Which step, counted from 1.
            completed: This rank's rollouts.
            experience: What the algorithm made of them; a `Batch` with a row for each has the advantages.
            policy: Decodes tokens where more was said than one completion.
            gather: Exchanges values with the other ranks.
            is_last: Whether it is the last step of the run, which is shown as well.
        """
        stretch = last_shown(step)
        shown, begins = stretch == step or is_last, self.last == 0
        due = {name for name, seen in self.followed.items() if seen != stretch or is_last}
        if step <= self.last or not (shown or due):
            return []
        written = list(_written(completed, experience, policy, None if shown else due))
        keys = [fold(self.seed, step, zlib.crc32(one.name.encode())) for one in written]
        offered = self._offered(written, keys, shown, due, begins)
        everyone = [
            (one["place"], rank, one) for rank, rows in enumerate(gather(offered)) for one in rows
        ]  # in the order of the prompts, whatever the ranks
        rows = _merged([one for *_, one in sorted(everyone, key=lambda row: row[:2])], step, shown, due, begins)
        for row in rows:
            self._remember(row)
        return rows

    def _offered(
        self, written: Sequence[Written], keys: Sequence[int], shown: bool, due: set[str], begins: bool
    ) -> list[Row]:
        """Return what this rank has to offer: its best, worst and a few random ones, and what is followed."""
        wanted = set[int]()
        if shown:
            order = sorted(range(len(written)), key=lambda index: (written[index].reward, keys[index]))
            wanted = {*order[:1], *order[-1:], *sorted(order, key=lambda index: keys[index])[:3]}
        followed = (one for one in written if one.recurs and (one.prompt_id in due or begins))
        groups = list(dict.fromkeys(one.group for one in followed))
        firsts = {one.group: index for index, one in reversed(list(enumerate(written))) if one.group in groups}
        wanted |= {firsts[group] for group in (groups[:FOLLOWED] if begins else groups)}
        begun = set(firsts.values())
        return [
            {**written[index].make(), "key": keys[index], "place": written[index].group, "first": index in begun}
            for index in sorted(wanted)
        ]

    def _remember(self, row: Mapping[str, Any]) -> None:
        self.last = max(self.last, int(row["step"]))
        chosen = row.get("chosen")
        if isinstance(chosen, list) and "followed" in chosen:
            self.followed[str(row.get("prompt_id"))] = last_shown(int(row["step"]))


def _merged(offered: Sequence[Row], step: int, shown: bool, due: set[str], begins: bool) -> list[Row]:
    """Return the rows to keep of what the ranks offer, each with what it was chosen as."""
    chosen: dict[int, list[str]] = {}
    if shown and offered:
        places = sorted(range(len(offered)), key=lambda index: (offered[index]["reward"], offered[index]["key"]))
        by_chance = sorted(places, key=lambda index: offered[index]["key"])
        others = [index for index in by_chance if index not in (places[0], places[-1])]
        for name, index in (("best", places[-1]), ("worst", places[0]), ("random", (others or by_chance)[0])):
            chosen.setdefault(index, []).append(name)
    seen: set[str] = set()
    for index, row in enumerate(offered):
        is_new = row["first"] and row["prompt_id"] not in seen
        if is_new and (row["prompt_id"] in due or (begins and len(seen) < FOLLOWED)):
            seen.add(row["prompt_id"])
            chosen.setdefault(index, []).append("followed")
    hidden = ("key", "place", "first")
    return [
        {"step": step, "chosen": names, **{k: v for k, v in offered[index].items() if k not in hidden}}
        for index, names in chosen.items()
    ]


# ---- one shape for all rollouts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """One thing that the model wrote."""

    name: str
    """Tells it from all others of its step."""
    group: int
    """Which prompt of the step it answers, in order."""
    prompt_id: str
    """The same for the same prompt, in every step."""
    reward: float
    make: Callable[[], Row]
    """Returns what is worth reading of it; takes a while, so only what is chosen is asked."""
    recurs: bool = True
    """Whether its prompt may come by again: what was said in a conversation does not."""


def _written(completed: Sequence[Any], experience: Any, policy: Any, prompts: set[str] | None) -> Iterator[Written]:
    """Yield what was written, or of it only the answers to some prompts."""
    if completed and isinstance(completed[0], Graph):
        yield from (one for one in _of_graphs(completed) if prompts is None or one.prompt_id in prompts)
        return
    for place, (group, members) in enumerate(groupby(enumerate(completed), key=lambda item: item[1].get("group_id"))):
        rows = list(members)
        prompt_id = _identify(rows[0][1])
        if prompts is not None and prompt_id not in prompts:
            continue
        mean = sum(float(one.reward) for _, one in rows) / len(rows)
        for index, one in rows:

            def make(one: Any = one, index: int = index, prompt_id: str = prompt_id, mean: float = mean) -> Row:
                return _describe(one, policy, prompt_id, _advantages(completed, experience)[index], mean)

            yield Written(f"{group}/{one.get('run_id', index)}", place, prompt_id, float(one.reward), make)


def _of_graphs(graphs: Sequence[Graph]) -> Iterator[Written]:
    """Yield the turns of trees whose probes are texts: what was said before, the probe, and what it was answered."""
    place = -1
    for number, graph in enumerate(graphs):
        for nodes in graph.groups():
            place += 1
            mean = sum(node.reward for node in nodes) / len(nodes)
            for index, node in enumerate(nodes):
                if not (isinstance(node.probe, str) and isinstance(node.context, str)):
                    continue

                def make(node: Any = node, mean: float = mean) -> Row:
                    turns = [["model", shortened(node.probe)], ["other", shortened(str(node.response))]]
                    row = _row(node.context, _hash(node.context), node.probe, node.reward, None, mean)
                    return {**row, "turns": turns}

                name, is_root = f"{number}/{place}/{index}", nodes is graph.children
                yield Written(name, place, _hash(node.context), float(node.reward), make, is_root)


def _describe(one: Trajectory, policy: Any, prompt_id: str, advantage: float | None, mean: float) -> Row:
    task, text = one.get("task"), one.get("text")
    prompt = getattr(task, "prompt", one.get("prompt"))
    turns = list(_turns(one, policy)) if _can_decode(policy) and one.tokens is not None else []
    if not isinstance(prompt, str):
        prompt = policy.decode(one.tokens[: _begin(one)]) if turns else ""
    if not isinstance(text, str):
        text = next((said for who, said in reversed(turns) if who == "model"), "")
    row = _row(prompt, prompt_id, text, float(one.reward), advantage, mean)
    row["task"] = str(getattr(task, "id", one.get("task_id", "")))
    row["finish_reason"] = one.get("finish_reason")
    row["scores"] = {str(k): float(v) for k, v in (one.get("scores") or {}).items() if math.isfinite(float(v))}
    if len(turns) > 1:
        row["turns"] = [[who, shortened(said, LONGEST_TEXT // 4)] for who, said in turns[:MOST_TURNS]]
    return row


def _row(prompt: str, prompt_id: str, text: str, reward: float, advantage: float | None, mean: float) -> Row:
    finite = advantage is not None and math.isfinite(advantage)
    return {
        "prompt_id": prompt_id, "prompt": shortened(prompt, LONGEST_PROMPT), "text": shortened(text),
        "reward": float(reward), "group_reward": mean, "advantage": advantage if finite else None,
    }  # fmt: skip


def _turns(one: Trajectory, policy: Any) -> Iterator[tuple[str, str]]:
    """Yield who said what after the prompt: the model what was sampled, somebody else what was not."""
    spoken = zip(one.loss_mask, one.tokens, strict=True)
    for counted, tokens in groupby(list(spoken)[_begin(one) :], key=lambda pair: bool(pair[0])):
        yield "model" if counted else "other", policy.decode([int(token) for _, token in tokens])


def _begin(one: Trajectory) -> int:
    """Return where the first sampled token stands."""
    return next((place for place, counted in enumerate(one.loss_mask) if counted), len(one.loss_mask))


def _advantages(completed: Sequence[Any], experience: Any) -> list[float | None]:
    nothing: list[float | None] = [None] * len(completed)
    if not isinstance(experience, Batch) or len(experience) != len(completed):
        return nothing
    names = [one.get("group_id") for one in completed]
    kept = experience.get("group_id", names)
    kept = kept.tolist() if hasattr(kept, "tolist") else kept
    if "advantages" not in experience.metadata or list(map(str, kept)) != list(map(str, names)):
        return nothing  # there are none, or whoever made it put the rows into another order
    found: list[float | None] = experience.metadata["advantages"].double().tolist()
    return found


def _can_decode(policy: Any) -> bool:
    return callable(getattr(policy, "decode", None))


def _identify(one: Trajectory) -> str:
    prompt = getattr(one.get("task"), "prompt", one.get("prompt"))
    return _hash(prompt if isinstance(prompt, str) else repr(list(one.tokens[: _begin(one)])))


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text of bounded length: where it is longer, its beginning and its end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
