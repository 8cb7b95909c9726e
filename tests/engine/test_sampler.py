"""The embedded sampler against the model and transformers: same tokens, same log-probabilities, however it batches."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bench.reference import to_transformers
from engine.config import ModelConfig
from engine.decode_loop import group_rows
from engine.embedded_sampler import EmbeddedSampler
from engine.model import Qwen3
from engine.sampler import Completion, Respond, SampleRequest, SamplingParams, Stopped
from engine.weights import new_model

VOCAB = 53
STOP = 9
GROUPED = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=96,
)
PLAIN = GROUPED.model_copy(update={"num_kv_heads": 4})
ONE_KV_HEAD = GROUPED.model_copy(update={"num_kv_heads": 1, "head_dim": 16})


def make_model(config: ModelConfig = GROUPED, vocab_size: int = VOCAB) -> Qwen3:
    model = new_model(config, vocab_size, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.mul_(6)
    return model


def make_sampler(model: Qwen3, max_rows: int = 512, compact_below: float = 0.75) -> EmbeddedSampler:
    sampler = EmbeddedSampler(max_rows, compact_below)
    sampler.load(model, 1)
    return sampler


def make_requests(num: int, num_samples: int = 4, budget: int | None = None) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    return [
        SampleRequest(tuple(rng.integers(10, VOCAB, int(rng.integers(1, 25))).tolist()), num_samples, budget)
        for _ in range(num)
    ]


def params(temperature: float = 1.0, max_new_tokens: int = 20, seed: int = 0, stop: int = STOP) -> SamplingParams:
    return SamplingParams(temperature, max_new_tokens, (stop,), seed)


def model_logprobs(model: Qwen3, request: SampleRequest, completion: Completion, temperature: float) -> torch.Tensor:
    ids = torch.tensor([request.token_ids_T + completion.token_ids])
    with torch.no_grad():
        logits_TV = model.logits(model(ids, torch.arange(ids.shape[1])[None])[0]) / temperature
    P = len(request.token_ids_T)
    rows = torch.arange(P - 1, P - 1 + len(completion.token_ids))
    return torch.log_softmax(logits_TV, -1)[rows, torch.tensor(completion.token_ids)]


def environment(stop: int) -> Respond:
    """Inserts request, sample and turn after the first two stops."""

    def respond(stopped: Sequence[Stopped]) -> list[list[int] | None]:
        turns = [s.token_ids.count(stop) for s in stopped]
        return [
            [10 + s.request, 20 + s.sample, turn] if turn <= 2 else None for s, turn in zip(stopped, turns, strict=True)
        ]

    return respond


answer_twice = environment(STOP)


@pytest.mark.parametrize("config", [GROUPED, PLAIN, ONE_KV_HEAD])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_the_models(config: ModelConfig, temperature: float) -> None:
    model = make_model(config)
    requests = make_requests(6)
    plain = make_sampler(model).sample(requests, params(temperature))
    stop = Counter(t for group in plain for c in group for t in c.token_ids if t > 2).most_common(1)[0][0]
    completions = make_sampler(model).sample(requests, params(temperature, stop=stop), environment(stop))
    num_inserted = 0
    for request, group in zip(requests, completions, strict=True):
        assert len(group) == request.num_samples
        for completion in group:
            mask = torch.tensor(completion.loss_mask)
            expected = model_logprobs(model, request, completion, temperature or 1.0) * mask
            assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-5
            num_inserted += int((~mask).sum())
    assert num_inserted > 0


def test_greedy_is_transformers_generate_token_by_token() -> None:
    from transformers import GenerationConfig

    model = make_model()
    reference = to_transformers(model)
    requests = make_requests(8, num_samples=1)
    found = make_sampler(model).sample(requests, params(0.0, max_new_tokens=30))
    generation = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=STOP, pad_token_id=0)
    for request, (completion,) in zip(requests, found, strict=True):
        ids = torch.tensor([request.token_ids_T])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        assert completion.token_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_every_draw_follows_the_models_distribution() -> None:
    model = make_model(vocab_size=12)
    request = SampleRequest((3, 7, 1, 1, 10), 20_000)
    (group,) = make_sampler(model).sample([request], params(0.8, max_new_tokens=2, stop=11))
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([request.token_ids_T]), torch.arange(5)[None])[0, -1])
    first = torch.softmax(logits.double() / 0.8, 0)
    tokens = torch.tensor([c.token_ids[0] for c in group])
    assert chi_square(tokens, first) < 35.0  # 0.9998 quantile of chi-square with 11 degrees of freedom
    likely = int(first.argmax())
    ids = torch.tensor([[*request.token_ids_T, likely]])
    with torch.no_grad():
        logits = model.logits(model(ids, torch.arange(6)[None])[0, -1])
    second = torch.tensor([c.token_ids[1] for c in group if c.token_ids[0] == likely])
    assert chi_square(second, torch.softmax(logits.double() / 0.8, 0)) < 35.0


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(tokens)
    assert expected.min() > 4
    return float(((torch.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum())


def test_the_same_call_gives_the_same_completions_and_another_seed_others() -> None:
    sampler = make_sampler(make_model())
    requests = make_requests(5)
    assert sampler.sample(requests, params()) == sampler.sample(requests, params())
    assert sampler.sample(requests, params()) != sampler.sample(requests, params(seed=1))


def test_p22_members_of_a_group_differ() -> None:
    (group,) = make_sampler(make_model()).sample([SampleRequest((1, 2, 3), 16)], params())
    assert len({c.token_ids for c in group}) > 12


@pytest.mark.parametrize(("max_rows", "compact_below"), [(7, 0.75), (512, 0.0), (512, 1.0), (1, 0.5)])
def test_batching_and_compaction_change_rounding_only(max_rows: int, compact_below: float) -> None:
    model = make_model()
    requests = make_requests(6, num_samples=3) + make_requests(3, num_samples=8, budget=7)
    expected = make_sampler(model).sample(requests, params(), answer_twice)
    found = make_sampler(model, max_rows, compact_below).sample(requests, params(), answer_twice)
    pairs = [(e, f) for es, fs in zip(expected, found, strict=True) for e, f in zip(es, fs, strict=True)]
    assert len(pairs) == 42
    for e, f in pairs:
        assert (e.token_ids, e.loss_mask, e.finish_reason, e.num_turns) == (
            f.token_ids,
            f.loss_mask,
            f.finish_reason,
            f.num_turns,
        )
        assert f.logprobs == pytest.approx(e.logprobs, abs=1e-5)


def test_a_stop_token_ends_a_row_and_the_budget_any_other() -> None:
    requests = make_requests(6, budget=8) + make_requests(6, budget=3)
    completions = make_sampler(make_model()).sample(requests, params(max_new_tokens=50))
    reasons = set()
    for request, group in zip(requests, completions, strict=True):
        for c in group:
            stopped = c.token_ids[-1] == STOP
            reasons.add(c.finish_reason)
            assert STOP not in c.token_ids[:-1]
            assert c.finish_reason == ("stop" if stopped else "length")
            assert len(c.token_ids) == request.max_new_tokens or (stopped and len(c.token_ids) < request.max_new_tokens)
            assert all(c.loss_mask)
            assert c.num_turns == 1
    assert reasons == {"stop", "length"}


def test_inserted_tokens_follow_each_stop_and_cost_no_budget() -> None:
    requests = make_requests(8, num_samples=6, budget=40)
    completions = make_sampler(make_model()).sample(requests, params(), answer_twice)
    turns_seen = set()
    for index, group in enumerate(completions):
        for sample, c in enumerate(group):
            sampled = [t for t, own in zip(c.token_ids, c.loss_mask, strict=True) if own]
            assert len(sampled) <= 40
            assert len(c.token_ids) - len(sampled) == 3 * (c.num_turns - 1)
            turns_seen.add(c.num_turns)
            turn, position = 1, 0
            while position < len(c.token_ids):
                if c.loss_mask[position]:
                    position += 1
                    continue
                assert c.token_ids[position - 1] == STOP
                assert c.token_ids[position : position + 3] == (10 + index, 20 + sample, turn)
                assert not any(c.loss_mask[position : position + 3])
                turn, position = turn + 1, position + 3
            assert turn == c.num_turns
            assert c.finish_reason == ("stop" if c.num_turns == 3 and sampled[-1] == STOP else "length")
            assert all(lp == 0.0 for lp, own in zip(c.logprobs, c.loss_mask, strict=True) if not own)
    assert turns_seen == {1, 2, 3}


def always_insert(stopped: Sequence[Stopped]) -> list[list[int]]:
    return [[1, STOP, 2] for _ in stopped]


def test_a_stop_on_the_last_token_of_the_budget_ends_with_length_when_the_environment_goes_on() -> None:
    sampler = make_sampler(make_model(vocab_size=10))
    request = SampleRequest((1, 2), 400, 1)
    (plain,) = sampler.sample([request], params())
    (answered,) = sampler.sample([request], params(), always_insert)
    stopped = [i for i, c in enumerate(plain) if c.finish_reason == "stop"]
    assert stopped
    assert {answered[i].finish_reason for i in stopped} == {"length"}
    assert [c.token_ids for c in answered] == [c.token_ids for c in plain]
    assert all(c.num_turns == 1 for c in answered)


def test_an_inserted_stop_token_asks_nobody_and_the_context_ends_an_endless_episode() -> None:
    asked: list[Stopped] = []

    def respond(stopped: Sequence[Stopped]) -> list[list[int]]:
        asked.extend(stopped)
        return always_insert(stopped)

    request = SampleRequest(tuple(range(6)), 8)
    (group,) = make_sampler(make_model(vocab_size=12)).sample([request], params(max_new_tokens=500), respond)
    room = GROUPED.max_position_embeddings - 6
    assert any(s.token_ids[-1] == STOP for s in asked)
    for index, c in enumerate(group):
        assert c.finish_reason == "length"
        assert len(c.token_ids) == room or (c.token_ids[-1] == STOP and len(c.token_ids) + 3 >= room)
        own_stops = sum(t == STOP and own for t, own in zip(c.token_ids, c.loss_mask, strict=True))
        assert own_stops == sum(s.sample == index for s in asked)
        assert c.num_turns > 1


def test_a_row_may_go_on_with_nothing_inserted() -> None:
    (group,) = make_sampler(make_model(vocab_size=12)).sample(
        [SampleRequest((1,), 32)], params(max_new_tokens=12), lambda stopped: [[] for _ in stopped]
    )
    assert all(len(c.token_ids) == 12 and all(c.loss_mask) for c in group)
    assert all(c.num_turns == 1 + c.token_ids[:-1].count(STOP) for c in group)
    assert max(c.num_turns for c in group) > 1


def test_respond_gets_all_rows_that_stopped_at_a_step_in_one_call() -> None:
    calls: list[list[Stopped]] = []

    def respond(stopped: Sequence[Stopped]) -> list[None]:
        calls.append(list(stopped))
        return [None] * len(stopped)

    request = SampleRequest((1, 5), 300)
    (group,) = make_sampler(make_model(vocab_size=12)).sample([request], params(max_new_tokens=6), respond)
    by_length = [sorted({len(s.token_ids) for s in call}) for call in calls]
    assert by_length == [[n] for n in sorted({len(c.token_ids) for c in group if c.finish_reason == "stop"})]
    told = {(s.sample, s.token_ids) for call in calls for s in call}
    assert told == {(i, c.token_ids) for i, c in enumerate(group) if c.finish_reason == "stop"}


def test_load_copies_the_weights_and_p18_a_new_load_replaces_them() -> None:
    model, requests = make_model(), make_requests(3)
    sampler = make_sampler(model)
    before = sampler.sample(requests, params())
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
        model.model.embed_tokens.weight.roll(1, 0)
    assert sampler.sample(requests, params()) == before
    sampler.load(model, 2)
    assert sampler.policy_version == 2
    after = sampler.sample(requests, params())
    assert after != before
    error = model_logprobs(model, requests[0], after[0][0], 1.0) - torch.tensor(after[0][0].logprobs)
    assert error.abs().max() < 1e-5


def test_no_requests_give_no_completions() -> None:
    assert make_sampler(make_model()).sample([], params()) == []


def test_what_cannot_be_sampled_is_refused_in_words() -> None:
    sampler = make_sampler(make_model())
    with pytest.raises(ValueError, match="call load first"):
        EmbeddedSampler().sample(make_requests(1), params())
    with pytest.raises(ValueError, match="prompt 0 has 96 tokens"):
        sampler.sample([SampleRequest((1,) * 96, 1)], params())
    with pytest.raises(ValueError, match="outside the model's vocabulary of 53"):
        sampler.sample([SampleRequest((1, VOCAB), 1)], params())
    for build in (
        lambda: SamplingParams(-1.0, 5, (STOP,), 0),
        lambda: SamplingParams(1.0, 0, (STOP,), 0),
        lambda: SampleRequest((), 1),
        lambda: SampleRequest((1,), 0),
        lambda: SampleRequest((1,), 1, 0),
        lambda: EmbeddedSampler(max_rows=0),
        lambda: EmbeddedSampler(compact_below=2.0),
    ):
        with pytest.raises(ValueError, match=r"at least|must|needs"):
            build()


def test_weights_that_are_not_finite_are_named() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        make_sampler(model).sample(make_requests(1), params())


def test_rows_are_grouped_without_losing_one() -> None:
    groups = np.array([0, 0, 0, 0, 0, 2, 2, 2, 3])
    group_R, row_RW, filled_B = group_rows(groups)
    assert sorted(row_RW.reshape(-1)[filled_B].tolist()) == list(range(9))
    assert (groups[row_RW] == group_R[:, None]).all()
    even = group_rows(np.repeat(np.arange(6), 8))
    assert even[1].shape == (6, 8)
    assert even[2].all()
