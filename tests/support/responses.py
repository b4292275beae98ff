"""Response caches made by real tiny targets, for tests of training."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dspark.training.shards import CachedSequence, SequenceInfo, ShardWriter, Split

PROMPT_TOKENS = 6
RESPONSE_TOKENS = 20


def write_responses(
    folder: Path, target: Path, *, count: int, tap_layers: tuple[int, ...] = (0,), first: int = 0
) -> None:
    """Add one shard of ``count`` greedy answers of a tiny target to random prompts.

    Every second response claims to be sampled, every fourth pair is held out. Prompts are
    numbered from ``first``.
    """
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    generator = torch.Generator().manual_seed(first)
    vocab_size = model.config.vocab_size
    writer = ShardWriter(folder, per_shard=count + 1)
    for number in range(first, first + count):
        prompt = torch.randint(vocab_size, (1, PROMPT_TOKENS), generator=generator)
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=RESPONSE_TOKENS,
            min_new_tokens=RESPONSE_TOKENS,
            do_sample=False,
        )
        with torch.inference_mode():
            output = model(ids, output_hidden_states=True)
            states = output.hidden_states
        info = SequenceInfo(
            id=f"prompt-{number}",
            domain="math" if number % 3 else "code",
            temperature=0.7 if number % 2 else 0.0,
            split=Split.HELD_OUT if number % 8 in (0, 1) else Split.TRAIN,
            finish="length",
        )
        taps = torch.cat([states[layer + 1][0] for layer in tap_layers], dim=-1)
        writer.add(
            CachedSequence(
                info=info,
                ids=ids[0].int(),
                loss_mask=(torch.arange(ids.shape[1]) >= PROMPT_TOKENS).to(torch.uint8),
                taps=taps.bfloat16(),
                hidden=states[-1][0].bfloat16(),
                log_normalizer=output.logits[0].logsumexp(-1),
            )
        )
    writer.flush()
