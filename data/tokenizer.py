"""A small byte-level BPE trained on the corpus, and its Hugging Face folder (tokenizer.json, tokenizer_config.json)."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.markup import CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, Markup

# Words with one leading sign, single digits, runs of other signs, white space: the pattern of Qwen's tokenizers without
# the English contractions, so that numbers are spelled digit by digit.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
FILES = ("tokenizer.json", "tokenizer_config.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most ``vocab_size`` entries (Sennrich et al. 2016; bytes as in GPT-2).

    Raises ValueError when not even the bytes and the markup fit.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"corpus.vocab_size = {vocab_size} cannot hold 256 bytes and the markup; use at least {smallest}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder that ``transformers.AutoTokenizer`` loads, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (END, PAD)],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_markup(folder: Path) -> Markup:
    """The markup of a model's or corpus's folder. Raises ValueError where it has no tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; name the output folder of a corpus or model stage")
    return Markup(Tokenizer.from_file(str(path)))
