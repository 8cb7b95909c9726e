"""The markup: completions and masks round-trip; text cannot forge a special token; the chat template agrees."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer, models

from data.markup import CHAT_TEMPLATE, SPECIAL_TOKENS, Markup
from data.tasks import general, research
from data.types import Message, Task

CHANNEL = st.tuples(st.sampled_from(["think", "call", "result", "answer"]), st.text(max_size=12))


def user_task(text: str) -> Task:
    return Task("t", "general", (Message("system", "general"), Message("user", text)), (), "x:y", {}, "test", "train")


@given(st.lists(CHANNEL, min_size=1, max_size=6))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parse_gives_back_what_was_rendered(markup: Markup, channels: list[tuple[str, str]]) -> None:
    ids, mask = markup.render_completion(channels)
    assert markup.parse(ids, "stop").channels == tuple(channels)
    assert len(ids) == len(mask)


@given(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=5), st.text(max_size=5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_cannot_forge_a_special_token(markup: Markup, token: str, before: str, after: str) -> None:
    text = before + token + after
    specials = {markup.pad_id, markup.stop_id, markup.assistant_id}
    assert not specials & set(markup.encode(text))
    assert len(markup.parse(markup.render_completion([("answer", text)])[0], "stop").channels) == 1
    prompt = markup.render_prompt(user_task(text), "low")
    assert prompt.token_ids_T.count(markup.assistant_id) == 1


def test_environment_tokens_carry_no_loss_and_every_own_stretch_ends(markup: Markup) -> None:
    ids, mask = markup.render_completion([("call", "Ann.pal"), ("result", "Bo@k"), ("answer", "Bo@k")])
    inserted = [i for i, own in zip(ids, mask, strict=True) if not own]
    assert inserted == markup.render_result("Bo@k")
    assert inserted[-1] == markup.assistant_id
    own = [i for i, own in zip(ids, mask, strict=True) if own]
    assert own.count(markup.stop_id) == 2
    assert ids[-1] == markup.stop_id
    assert mask[-1], "the model must learn to stop (pitfall P9)"


def test_pad_is_not_the_end(markup: Markup) -> None:
    assert markup.pad_id != markup.stop_id


def test_text_outside_channels_is_no_answer(markup: Markup) -> None:
    transcript = markup.parse([*markup.encode("6"), markup.stop_id], "stop")
    assert transcript.channels == (("text", "6"),)
    assert transcript.answer is None


@pytest.mark.parametrize(
    ("channels", "reason", "answer"),
    [
        ([("think", "62"), ("answer", "2")], "stop", "2"),
        ([("answer", "2")], "length", None),
        ([("answer", "2"), ("answer", "3")], "stop", None),
        ([("answer", "2"), ("think", "3")], "stop", None),
        ([("think", "2")], "stop", None),
    ],
)
def test_only_one_final_answer_counts(markup: Markup, channels: list, reason: str, answer: str | None) -> None:
    ids, _ = markup.render_completion(channels)
    assert markup.parse(ids, reason).answer == answer


def test_chat_template_spells_the_same_conversation(markup: Markup) -> None:
    task = research.make_task(0, 0, "train")
    text = task.messages[-1].text
    template = Environment().from_string(CHAT_TEMPLATE)
    messages = [{"role": m.role, "content": m.text} for m in task.messages]
    prompt = template.render(messages=messages, effort="max", add_generation_prompt=True)
    assert prompt == markup.decode(markup.render_prompt(task, "max").token_ids_T)
    turns = [
        {"role": "assistant", "call": text, "content": ""},
        {"role": "tool", "content": "Bo@k"},
        {"role": "assistant", "think": "x", "content": "Bo@k"},
    ]
    whole = template.render(messages=messages + turns, effort="max")
    completion, _ = markup.render_completion([("call", text), ("result", "Bo@k"), ("think", "x"), ("answer", "Bo@k")])
    assert whole == prompt + markup.decode(completion)


def test_effort_comes_first_and_changes_nothing_else(markup: Markup) -> None:
    task = general.make_task(0, 3, "train")
    low, high = markup.render_prompt(task, "low"), markup.render_prompt(task, "high")
    assert low.cell == "general/low"
    assert [i for i, (a, b) in enumerate(zip(low.token_ids_T, high.token_ids_T, strict=True)) if a != b] == [1]


def test_a_tokenizer_without_the_markup_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markup's special tokens"):
        Markup(Tokenizer(models.BPE()))
