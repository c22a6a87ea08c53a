"""Parameter groups of a config, an adapter and a classifier, the loss, and text samples."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from config.errors import UserError
from config.schema import AdapterSection, ModelSection, OptimizerSection, ParameterGroupSection
from modeling.adapter import add_adapter
from modeling.build import build_model, model_config
from modeling.generate import sample_text
from modeling.linear_cross_entropy import label_loss_sum
from modeling.parameter_groups import parameter_groups

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}


def llama(*, tied: bool = True) -> torch.nn.Module:
    """A four-block Llama for 64 tokens."""
    section = ModelSection(architecture="llama", config={**SMALL, "tie_word_embeddings": tied})
    config = model_config(section, vocab_size=64, sequence_length=32)
    return build_model(section, config, seed=0, gather=lambda parameters: nullcontext(True)).train()


def test_muon_leaves_heads_and_tables_alone_that_an_adapter_trains_as_copies():
    section = AdapterSection(kind="lora", r=2, modules_to_save=("lm_head", "embed_tokens"))
    model = add_adapter(llama(tied=False), section, seed=0)
    matrices, head, rest = parameter_groups(model, OptimizerSection(name="muon", weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(".lora_" in names[id(p)] for p in matrices["params"])
    assert [names[id(p)] for p in head["params"]] == ["lm_head.modules_to_save.default.weight"]
    assert [names[id(p)] for p in rest["params"]] == ["model.embed_tokens.modules_to_save.default.weight"]
    assert (matrices["matrix"], head["matrix"], head["weight_decay"]) == (True, False, 0.3)
    assert (rest["matrix"], rest["weight_decay"]) == (False, 0.0)


@pytest.mark.parametrize(("family", "last"), [("bert", "classifier"), ("roberta", "classifier.out_proj")])
def test_muon_leaves_the_last_layer_of_a_classifier_alone(family, last):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=50, num_labels=3, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    _, head, _ = parameter_groups(model, OptimizerSection(name="muon", weight_decay=0.3))
    assert [id(p) for p in head["params"]] == [id(model.get_submodule(last).weight)]


def test_a_group_of_the_config_has_its_own_rate_and_decay_and_the_last_match_counts():
    groups = (
        ParameterGroupSection(match="model.layers.*", learning_rate=0.002),
        ParameterGroupSection(match="model.layers.1.*norm*", weight_decay=0.5),
    )
    model = llama()
    section = OptimizerSection(learning_rate=0.008, weight_decay=0.3, groups=groups)
    found = {id(p): group for group in parameter_groups(model, section) for p in group["params"]}
    assert len(found) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        last = "layers.1." in name and "norm" in name
        factor = 0.25 if ".layers." in name and not last else 1.0
        decay = 0.5 if last else 0.3 if name.endswith("proj.weight") else 0.0
        assert (found[id(parameter)]["lr_factor"], found[id(parameter)]["weight_decay"]) == (factor, decay), name


def test_a_group_of_the_config_that_matches_nothing_is_refused():
    groups = (ParameterGroupSection(match="model.layer.*"),)
    with pytest.raises(UserError, match=r"'model.layer.\*' is the last match of no trained.*model.embed_tokens"):
        parameter_groups(llama(), OptimizerSection(groups=groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_the_fp64_sum_over_the_labels_that_count(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, 11, generator=generator) * 20).to(dtype)
    labels = torch.randint(11, (3, 5), generator=generator)
    labels[0, :3] = -100
    rows = torch.log_softmax(logits.double(), dim=-1)
    expected = -sum(rows[b, t, labels[b, t]] for b in range(3) for t in range(5) if labels[b, t] != -100)
    assert label_loss_sum(logits, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_fully_masked_batch_has_a_zero_loss_with_zero_gradients():
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = label_loss_sum(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


class Letters:
    """The little of a tokenizer that sampling needs."""

    eos_token_id = 0

    def __call__(self, text, **options):
        return type("Encoded", (), {"input_ids": torch.tensor([[ord(c) % 64 for c in text]])})

    def decode(self, ids, **options):
        return "".join(chr(48 + int(i)) for i in ids)


def test_a_sample_is_as_long_as_asked_repeatable_and_leaves_no_trace():
    model = llama()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    options = {"prompt": "abc", "tokens": 9, "temperature": 0.8, "device": torch.device("cpu")}
    first = sample_text(model, Letters(), seed=1, **options)
    assert torch.equal(torch.rand(2), expected)
    assert len(first) == 12
    assert first == sample_text(model, Letters(), seed=1, **options)
    assert first != sample_text(model, Letters(), seed=2, **options)
    assert model.training
