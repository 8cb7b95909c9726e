"""Our model as transformers' own ``Qwen3ForCausalLM``: what benchmarks and tests compare with."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.model import Qwen3


def to_transformers(model: Qwen3) -> Qwen3ForCausalLM:
    """The same weights in transformers' module, in evaluation mode. Raises RuntimeError when a name or size differs."""
    shape = model.shape
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    reference = Qwen3ForCausalLM(config).eval()
    missing, unexpected = reference.load_state_dict(model.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding
        raise RuntimeError(f"transformers' Qwen3 has other parameters: lacks {unexpected}, wants {missing}")
    return reference
