"""Tokens per second: the engine beside the trainer against `transformers.generate`, on the same weights.

    OMP_NUM_THREADS=1 python scripts/bench/sampling.py --model demo --questions 8 --samples 8

Questions come from ReasoningGYM (two tasks of the demo). Both sides draw from the whole distribution at temperature 1,
with the same limit of new tokens, and take turns. Only useful tokens count: those up to a completion's end. CPU time is
shown beside wall time, because on a shared machine only it compares.
"""

import random
import statistics
import time
from collections.abc import Callable

import click
import reasoning_gym
import torch

from sapo_node.inference.sampling import sample
from sapo_node.training.policy import Policy, load_policy

TASKS = ("basic_arithmetic", "base_conversion")


@click.command()
@click.option("--model", default="demo", show_default=True, help="An embedded model, a folder or a hub name.")
@click.option("--questions", default=8, show_default=True)
@click.option("--samples", default=8, show_default=True, help="Completions a question.")
@click.option("--max-tokens", default=24, show_default=True)
@click.option("--repeats", default=10, show_default=True)
def main(model: str, questions: int, samples: int, max_tokens: int, repeats: int) -> None:
    """Measure both engines."""
    torch.set_num_threads(1)
    policy = load_policy(model)
    pick = random.Random(0)
    texts = [reasoning_gym.create_dataset(pick.choice(TASKS), size=1, seed=seed)[0] for seed in range(questions)]
    prompts = [policy.encoder.prompt(entry["question"]) for entry in texts]
    generator = torch.Generator(policy.device).manual_seed(0)

    def own() -> int:
        drawn = sample(
            policy,
            prompts,
            n=samples,
            max_tokens=max_tokens,
            temperature=1.0,
            generator=generator,
            batch_completions=questions * samples,
        )
        return sum(len(one.token_ids) for completions in drawn for one in completions)

    engines: dict[str, Callable[[], int]] = {
        "own": own,
        "generate": lambda: generate(policy, prompts, samples, max_tokens),
    }
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = engine()
            if repeat:  # the first run warms up
                speeds[name].append((tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)))
    print(f"{model}: {questions} questions x {samples} completions, prompts of {sorted(map(len, prompts))} tokens")
    for name, pairs in speeds.items():
        wall_speed, cpu_speed = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:>9}: {wall_speed:7.0f} tokens/s, {cpu_speed:7.0f} tokens per CPU second (medians of {repeats})")


def generate(policy: Policy, prompts: list[list[int]], samples: int, max_tokens: int) -> int:
    """`transformers.generate` on left-padded prompts; returns the number of useful tokens."""
    width = max(map(len, prompts))
    pad = policy.stop_ids[0]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=policy.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=policy.device)
    output = policy.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=list(policy.stop_ids),
        pad_token_id=pad,
    )
    ended = torch.isin(output[:, width:], torch.tensor(policy.stop_ids, device=policy.device)).long()
    before_end = ended.cumsum(-1) - ended == 0  # the end token itself is useful, what follows is padding
    return int(before_end.sum())


if __name__ == "__main__":
    main()
