"""Episodes: sampler x harness. Prompts go in, groups of graded rollouts come out."""

from collections.abc import Mapping, Sequence

from data.harness import Harness, grade
from data.markup import Markup
from data.types import Group, Prompt, Rollout, Segment, Transcript
from engine.sampler import Completion, Sampler, SampleRequest, SamplingParams, Stopped


def run_episodes(
    sampler: Sampler,
    markup: Markup,
    prompts_P: Sequence[Prompt],
    *,
    num_samples: int,
    budgets: Mapping[str, int],
    temperature: float,
    seed: int,
    max_turns: int,
) -> list[Group]:
    """``num_samples`` graded rollouts of every prompt, in the prompts' order.

    ``budgets`` maps a cell to the most tokens that the policy may sample in one episode: a rollout that has spent them
    ends with ``finish_reason`` "length" and fails. Temperature 0 is greedy. Raises KeyError for a cell without budget.
    """
    harness = Harness(markup, max_turns)

    def respond(stopped: Sequence[Stopped]) -> list[list[int] | None]:
        return [harness.respond(prompts_P[s.request].task, s.token_ids) for s in stopped]

    requests = [SampleRequest(p.token_ids_T, num_samples, budgets[p.cell]) for p in prompts_P]
    params = SamplingParams(temperature, max(budgets.values()), (markup.stop_id,), seed)
    completions = sampler.sample(requests, params, respond)
    rollouts = [
        [_to_rollout(prompt, completion, sampler.policy_version) for completion in group]
        for prompt, group in zip(prompts_P, completions, strict=True)
    ]
    pairs = [
        (prompt.task, _transcript(markup, rollout))
        for prompt, group in zip(prompts_P, rollouts, strict=True)
        for rollout in group
    ]
    verdicts = iter(grade(pairs))
    return [
        Group(prompt, tuple(group), tuple(next(verdicts) for _ in group))
        for prompt, group in zip(prompts_P, rollouts, strict=True)
    ]


def _transcript(markup: Markup, rollout: Rollout) -> Transcript:
    start = rollout.prompt_length
    return markup.parse(rollout.token_ids_T[start:], rollout.finish_reason, rollout.loss_mask_T[start:])


def _to_rollout(prompt: Prompt, completion: Completion, policy_version: int) -> Rollout:
    length = len(prompt.token_ids_T)
    end = length + len(completion.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        prompt_length=length,
        token_ids_T=(*prompt.token_ids_T, *completion.token_ids),
        loss_mask_T=(False,) * length + tuple(completion.loss_mask),
        sampler_logprobs_T=(0.0,) * length + tuple(completion.logprobs),
        segments=(Segment(length, end, policy_version),),
        finish_reason=completion.finish_reason,
        num_turns=completion.num_turns,
    )
