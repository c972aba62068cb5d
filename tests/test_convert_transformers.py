"""convert() on the classes of transformers and peft, with random weights, where they are installed.

`make test` does not install them: `pip install transformers peft` into .venv, and these run too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import narrowfloat as nf

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed (make test does without)"
)

WIDTH, VOCABULARY = 128, 1000
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4,
    "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BERT = {
    "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2,
    "vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": WIDTH,
}  # fmt: skip
MOE = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": WIDTH}


def made(cls: str, **config: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, cls)
    return kind(kind.config_class(**config, **SPECIAL)).eval()


def left(model: nn.Module, recipe: str = "fp8", **options: Any) -> dict[str, str]:
    return dict(nf.plan(model, recipe, **options).left)


@pytest.mark.parametrize(
    ("cls", "config", "heads"),
    [
        ("LlamaForCausalLM", LLAMA, ["lm_head"]),
        ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, ["lm_head"]),
        ("LlamaModel", LLAMA, []),
        ("LlamaForSequenceClassification", {**LLAMA, "num_labels": 2}, ["score"]),
        ("BertForMaskedLM", BERT, ["cls.predictions.decoder"]),
        ("BertForSequenceClassification", BERT, ["classifier"]),
        ("RobertaForSequenceClassification", BERT, ["classifier.out_proj"]),
    ],
)
def test_r13_the_head_of_a_transformer(cls: str, config: Any, heads: list[str]) -> None:
    """R-13: it alone is left, and converted where it is asked for."""
    model = made(cls, **config)
    report = nf.convert(model)
    assert [name for name, _ in report.left] == heads
    assert nf.convert(model, head=True).converted == heads
    assert nf.plan(model, head=True).share == 1
    ids = torch.arange(48).view(2, 24) + 3
    assert all(t.isfinite().all() for t in model(ids).values() if isinstance(t, torch.Tensor))


def test_r14_encoder_and_decoder() -> None:
    """R-14: each has its last blocks."""
    model = made(
        "T5ForConditionalGeneration", d_model=WIDTH, d_kv=32, d_ff=256, num_heads=4, num_layers=3,
        num_decoder_layers=8, vocab_size=VOCABULARY,
    )  # fmt: skip
    found = {".".join(name.split(".")[:3]) for name in left(model, "nvfp4")}
    assert found == {"encoder.block.2", "decoder.block.6", "decoder.block.7", "lm_head"}


def test_r17_gpt2_says_what_it_cannot_take() -> None:
    """R-17: its layers are Conv1D."""
    model = made("GPT2LMHeadModel", **GPT2)
    with pytest.warns(UserWarning, match="nothing of GPT2LMHeadModel runs in fp8"):
        report = nf.convert(model)
    assert len(report.others) == 8 and report.share == 0
    assert all("in transformers' Conv1D" in what for _, what in report.others)
    with pytest.raises(ValueError, match="without any .it has h.0.attn.c_attn.weight"):
        nf.convert(made("GPT2Model", **GPT2))


@pytest.mark.parametrize("cls", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_r15_r17_experts_and_their_router(cls: str) -> None:
    """R-15, R-17: named and counted; experts in a list of layers are converted, and routers of
    nn.Linear left."""
    report = nf.convert(made(cls, **MOE))
    assert 0 < report.share < report.flops_share < 1
    named = {*dict(report.left), *(name.removesuffix(".weight") for name, _ in report.others)}
    assert "model.layers.0.mlp.gate" in named
    experts = [name for name in named if ".experts." in name]
    assert experts or any(".experts." in name for name in report.converted)


def test_r06_packed_and_merged_adapters() -> None:
    """R-06, R-15: adapters of peft are left, merging goes on over layers of ours, and over packed
    ones ends in our words."""
    peft = pytest.importorskip("peft", reason="peft is not installed (make test does without)")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(made("LlamaForCausalLM", **LLAMA), config)
    report = nf.convert(model)
    kinds = {why.split(" (")[0] for name, why in report.left if "lora" in name}
    assert kinds == {"an adapter"} and len(report.left) == 4 * 2 * 2 + 1
    merged = copy.deepcopy(model).merge_and_unload()
    q = merged.model.layers[0].self_attn.q_proj
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(q) is nf.Linear
    assert torch.allclose(q.weight, layer.base_layer.weight + layer.get_delta_weight("default"))
    packed = nf.convert(model, "nvfp4", "*base_layer", keep_last=0, inference=True)
    assert packed.converted
    with pytest.raises(AttributeError, match="the weight is packed in FP4"):
        model.merge_and_unload()


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4"])
def test_r11_there_and_back(recipe: str) -> None:
    """R-11: a model of transformers computes what it did before."""
    model, ids = made("LlamaForCausalLM", **LLAMA), torch.arange(48).view(2, 24) + 3
    with torch.no_grad():
        want = model(ids).logits
        report = nf.convert(model, recipe)
        assert not torch.equal(model(ids).logits, want)
        assert nf.revert(model) == report.converted
        assert torch.equal(model(ids).logits, want)
