"""The losses and their gradients are those of TRL's own `_compute_loss` on the same recorded answers.

What is compared: GRPO, DAPO, Dr. GRPO, GSPO and CISPO, each with TRL's truncated importance sampling and, where the
ratio is a token's, with its repaired KL term. TRL's method runs as it is, with the log-probabilities of plain torch in
place of its fused head, on prompts padded at the left and answers padded at the right. `make trl` installs it.
"""

from collections import defaultdict
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.schema import GrpoSection
from config.task import ALGORITHMS, DECIDED
from modeling.objectives import policy
from modeling.objectives.policy import PolicyGradient, counts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trl,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed; make trl"),
]
NAMES = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo", "gspo": "grpo", "cispo": "cispo"}
PROMPT, LONGEST, ROWS, VOCABULARY = 5, 8, 12, 23


def theirs(section: GrpoSection, table: torch.Tensor, rows: dict[str, Any]) -> torch.Tensor:
    """TRL's loss of one micro-batch that is the whole step."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    def log_probs(model: Any, ids: Any, mask: Any, kept: int, **_: Any) -> Any:
        logits = (table[ids[:, :-1]] / section.temperature)[:, -kept:].log_softmax(-1)
        found = logits.gather(2, ids[:, -kept:, None])[..., 0]
        return found, -(logits.exp() * logits).sum(-1).detach(), None

    own = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=section.ratio,
        beta=section.beta,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        loss_type=NAMES[section.algorithm],
        epsilon_low=section.clip_low,
        epsilon_high=section.clip_high,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=section.max_new_tokens,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=log_probs,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            autocast=nullcontext,
            reduce=lambda values, reduction: values,
            gather=lambda values: values,
            gather_for_metrics=lambda values: values,
        ),
    )
    loss: torch.Tensor = GRPOTrainer._compute_loss(own, None, rows)
    return loss


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("algorithm", NAMES)
def test_each_loss_is_trls(algorithm: str, beta: float) -> None:
    decided = dict(zip(DECIDED, ALGORITHMS[algorithm], strict=True))
    section = GrpoSection(algorithm=algorithm, max_new_tokens=LONGEST, temperature=0.9, beta=beta, **decided)
    if beta and section.ratio == "sequence":
        pytest.skip("TRL weighs the KL term of a sequence's ratio by that ratio, which is not pi / pi_old of the token")
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, VOCABULARY, requires_grad=True)
    lengths = torch.randint(1, LONGEST + 1, (ROWS,))
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    before = [int(length) for length in torch.randint(1, PROMPT + 1, (ROWS,))]
    prompts = torch.randint(VOCABULARY, (ROWS, PROMPT))
    answers = torch.randint(VOCABULARY, (ROWS, LONGEST)) * mask
    noise = {name: 0.4 * torch.randn(ROWS, LONGEST) for name in (policy.OLD, policy.SAMPLER, policy.REFERENCE)}
    with torch.no_grad():
        inputs = torch.cat([prompts[:, -1:], answers[:, :-1]], 1)
        now = (table[inputs] / 0.9).log_softmax(-1).gather(2, answers[..., None])[..., 0]
    apart = {name: now + spread for name, spread in noise.items()}
    weight = (apart[policy.OLD] - apart[policy.SAMPLER]).exp().clamp(max=section.correction_high)
    advantage = torch.randn(ROWS)
    rows = {
        "prompt_ids": prompts,
        "prompt_mask": torch.stack([(torch.arange(PROMPT) >= PROMPT - length).long() for length in before]),
        "completion_ids": answers,
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": apart[policy.OLD],
        "ref_per_token_logps": apart[policy.REFERENCE],
        "importance_sampling_ratio": weight,
        "num_items_in_batch": mask.sum(),
    }
    loss = theirs(section, table, rows)
    [exact] = torch.autograd.grad(loss, table)

    length = PROMPT + LONGEST - 1
    ids, labels = torch.zeros(ROWS, length, dtype=torch.int64), torch.full((ROWS, length), -100)
    own = {name: torch.zeros(ROWS, length) for name in apart}
    for row, (start, count) in enumerate(zip(before, lengths.tolist(), strict=True)):
        tokens = torch.cat([prompts[row, PROMPT - start :], answers[row, :count]])
        ids[row, : len(tokens) - 1], place = tokens[:-1], slice(start - 1, start - 1 + count)
        labels[row, place] = answers[row, :count]
        for name, values in apart.items():
            own[name][row, place] = values[row, :count]
    given = {"input_ids": ids, policy.ADVANTAGE: advantage, policy.REWARD: advantage, policy.ENDED: torch.ones(ROWS)}
    given |= {name: values for name, values in own.items() if beta or name != policy.REFERENCE}
    scored = PolicyGradient(section).score(
        lambda input_ids, use_cache: SimpleNamespace(logits=table[input_ids]), given, labels
    )
    mine = scored.loss / counts_of(lengths, section).sum()
    assert float(mine.detach()) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(torch.autograd.grad(mine, table)[0], exact, rtol=1e-5, atol=1e-7)
