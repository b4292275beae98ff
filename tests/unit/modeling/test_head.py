import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark.core.errors import TargetError
from dspark.modeling.head import LocalHead
from tests.support.tiny import tiny_target


def test_equals_the_models_own_head(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder)
    hidden = torch.randn(6, model.config.hidden_size)
    with torch.no_grad():
        expected = model.lm_head(hidden)
    assert torch.equal(LocalHead.from_folder(folder, "fp32").logits(hidden), expected)


def test_tied_checkpoints_give_their_embedding(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    head = LocalHead.from_folder(tmp_path / "tied", "fp32")
    assert torch.equal(head.weight, model.get_input_embeddings().weight)


def test_scale_and_soft_cap(tmp_path: Path) -> None:
    weight, hidden = torch.randn(20, 8), torch.randn(3, 8)
    capped = LocalHead(weight, "fp32", scale=0.5, soft_cap=2.0).logits(hidden)
    torch.testing.assert_close(capped, 2.0 * torch.tanh(hidden @ weight.T * 0.5 / 2.0))


def test_logits_are_fp32_whatever_comes_in() -> None:
    head = LocalHead(torch.randn(20, 8), "fp32")
    assert head.logits(torch.randn(3, 8).bfloat16()).dtype == torch.float32


def test_digest_tells_weights_and_transforms_apart() -> None:
    weight = torch.randn(20, 8)
    digest = LocalHead(weight, "fp32").digest
    assert digest == LocalHead(weight.clone(), "fp32").digest
    assert digest != LocalHead(weight + 1e-3, "fp32").digest
    assert digest != LocalHead(weight, "fp32", soft_cap=30.0).digest


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(TargetError, match=r"no tensor lm_head\.weight"):
        LocalHead.from_folder(tmp_path, "fp32")
