"""The chat markup: special tokens, rendering of prompts and traces to token ids with their loss mask, and parsing back.

    <|system|>high general<|user|>7+5*3<|assistant|><|think|>7+5=2*3=6<|answer|>6<|end|>
    <|assistant|><|call|>Ann.friend<|end|><|result|>Bo@k<|assistant|><|answer|>Bo@k<|end|>

A message of the assistant is a sequence of channels and ends with ``<|end|>``; what the environment inserts (a tool's
result and the next ``<|assistant|>``) carries no loss. Text can never forge a special token: it is encoded with the
special tokens' spelling switched off.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from data.types import FinishReason, Prompt, Task, Transcript

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
CHANNELS = ("think", "call", "result", "answer")
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, *(f"<|{name}|>" for name in CHANNELS), END)

CHAT_TEMPLATE = (
    "{%- set options = namespace(text=effort | default('high')) -%}"
    "{%- for message in messages if message.role == 'system' -%}"
    "{%- set options.text = options.text + ' ' + message.content -%}"
    "{%- endfor -%}"
    "<|system|>{{ options.text }}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}<|user|>{{ message.content }}"
    "{%- elif message.role == 'tool' -%}<|result|>{{ message.content }}"
    "{%- elif message.role == 'assistant' -%}<|assistant|>"
    "{%- if message.think -%}<|think|>{{ message.think }}{%- endif -%}"
    "{%- if message.call -%}<|call|>{{ message.call }}{%- else -%}<|answer|>{{ message.content }}{%- endif -%}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


class Markup:
    """Renders and parses with one tokenizer. ``stop_id`` ends every message, ``pad_id`` never has a loss."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        ids = {token: vocabulary[token] for token in SPECIAL_TOKENS if token in vocabulary}
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(f"the tokenizer lacks the markup's special tokens {missing}; train it with data.tokenizer")
        tokenizer.encode_special_tokens = True
        self._ids = ids
        self._channel_of_id = {ids[f"<|{name}|>"]: name for name in CHANNELS}
        self.pad_id: int = ids[PAD]
        self.stop_id: int = ids[END]
        self.assistant_id: int = ids[ASSISTANT]
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; the spelling of a special token in it stays plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Readable text, special tokens spelled out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def render_prompt(self, task: Task, effort: str) -> Prompt:
        """The task at one effort. Global options (effort, then the system text) come first: a cache is shared."""
        options = " ".join([effort, *(m.text for m in task.messages if m.role == "system")])
        ids = [self._ids[SYSTEM], *self.encode(options)]
        for message in task.messages:
            if message.role == "user":
                ids += [self._ids[USER], *self.encode(message.text)]
        return Prompt(task, effort, (*ids, self.assistant_id))

    def render_completion(self, channels: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of what follows a prompt: every stretch of channels up to a result or the end."""
        ids: list[int] = []
        mask: list[bool] = []
        for position, (channel, text) in enumerate(channels):
            own = channel != "result"
            piece = [self._ids[f"<|{channel}|>"], *self.encode(text)]
            if not own:
                piece.append(self.assistant_id)
            elif position + 1 == len(channels) or channels[position + 1][0] == "result":
                piece.append(self.stop_id)
            ids += piece
            mask += [own] * len(piece)
        return ids, mask

    def render_result(self, text: str) -> list[int]:
        """What the environment inserts after a tool call."""
        return self.render_completion([("result", text)])[0]

    def parse(
        self, completion_ids: Sequence[int], finish_reason: FinishReason, loss_mask: Sequence[bool] | None = None
    ) -> Transcript:
        """The channels of a completion. Text outside every channel becomes a channel named ``text``.

        With ``loss_mask`` (true where the policy sampled), a result that the policy wrote itself becomes ``text`` too:
        only the environment retrieves.
        """
        channels: list[tuple[str, list[int]]] = []
        sampled = loss_mask if loss_mask is not None else (False,) * len(completion_ids)
        for token_id, own in zip(completion_ids, sampled, strict=True):
            if token_id in self._channel_of_id:
                name = self._channel_of_id[token_id]
                channels.append(("text" if own and name == "result" else name, []))
            elif token_id not in (self.stop_id, self.assistant_id):
                if not channels:
                    channels.append(("text", []))
                channels[-1][1].append(token_id)
        return Transcript(tuple((name, self.decode(ids)) for name, ids in channels), finish_reason)
