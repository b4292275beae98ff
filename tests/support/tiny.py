"""Tiny random models in folders, small enough that a test runs the real thing in milliseconds."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.modeling.drafters.checkpoint import save_drafter
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.families import new_drafter

Family = Literal["llama", "qwen3"]

TINY_VOCAB = 264  # 256 bytes, the special tokens, and a few ids no text maps to
HIDDEN_SIZE = 32
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_target(
    folder: Path,
    *,
    family: Family = "llama",
    vocab_size: int = TINY_VOCAB,
    num_layers: int = 2,
    max_context: int = 512,
    seed: int = 0,
) -> Path:
    """Write a random fp32 target (d=32, 4 heads on 2 KV heads) that any code path can load.

    With at least 259 tokens the folder also gets a byte-level tokenizer with a chat template, so
    that every text is a prompt; with fewer, prompts are token ids and no id ends a text.
    """
    has_text = vocab_size >= 256 + len(SPECIAL_TOKENS)
    eos = 256 + SPECIAL_TOKENS.index("<|im_end|>") if has_text else None
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        # Wide enough that the argmax varies with the prefix and no two logits nearly tie.
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    # Strong embeddings make the next token depend mostly, not only, on the one before it, so that a
    # drafter which knows bigrams is right about four times in ten.
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(32.0)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
    model.save_pretrained(folder)
    if has_text:
        byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: ids 0..255 in the byte alphabet's order, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_drafter(folder: Path, target: Path, *, block_size: int = 4, seed: int = 1) -> Path:
    """Write a drafter for a tiny target that is right often enough for drafts to be kept.

    Its layers are random; its Markov head holds the target's own next-token logits after each
    single token, in full rank, so drafts follow the target's bigrams.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target)
    vocab_size = model.config.vocab_size
    config = DrafterConfig.for_target(
        target,
        target_layer_ids=(0, model.config.num_hidden_layers - 1),
        num_hidden_layers=1,
        block_size=block_size,
        mask_token_id=vocab_size - 1,
        markov_rank=vocab_size,
        enable_confidence_head=True,
    )
    head = model.get_output_embeddings().weight.detach()
    drafter = new_drafter(config, model.get_input_embeddings().weight.detach(), head)
    with torch.no_grad():
        bigrams = model(torch.arange(vocab_size)[:, None]).logits[:, 0]  # [V, V]
        drafter.sequential_head.markov_w1.weight.copy_(torch.eye(vocab_size))
        drafter.sequential_head.markov_w2.weight.copy_(bigrams.T)
        drafter.norm.weight.fill_(0.1)  # the base logits only disturb the bigrams
    save_drafter(drafter, folder)
    return folder
