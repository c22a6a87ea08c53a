"""A planted activation that grows until FP16 overflows: the heat map's sentence names it and the step, long before."""

import pytest

from config.schema import WarningsSection
from tests.training.jobs import growing_cases
from tracking.heatmap.grid import HeatCollector
from tracking.heatmap.words import dangers, sentences
from training.early_warnings import EarlyWarnings


def heat_until(events, step):
    collector = HeatCollector()
    collector.add({"event": "run_start", "step": 0, "time": 1.0, "tokens": 0, "compute": "fp16"})
    for event in events:
        if event["step"] <= step:
            collector.add(event)
    return collector.heat()


@pytest.mark.slow
def test_the_sentence_names_the_layer_and_the_step_of_the_overflow(pair):
    results = pair.run(growing_cases.grown, factor=1.12, every=2)
    assert results[0] == results[1]
    found = results[0]
    assert found["module"] == growing_cases.MODULE and found["overflow"] > 80
    for share in (0.6, 0.75, 0.9):
        heat = heat_until(found["events"], share * found["overflow"])
        danger = dangers(heat)[0]
        assert danger.modules == [growing_cases.MODULE]
        assert danger.overflow == pytest.approx(found["overflow"], rel=0.1), share
        line = sentences(heat)["activation"]
        assert line.startswith("layer 1 down_proj: activations at ")
        assert f"overflow expected near step {danger.overflow}" in line
    # The same as an early warning, with 30 steps' notice asked for.
    judge = EarlyWarnings(WarningsSection(overflow_steps=30), beta2=None, clipping=0.0, in_fp16=lambda name: True)
    said = [
        (event["step"], it)
        for event in found["events"]
        for it in judge.after_telemetry(event["step"], event, warm=True)
    ]
    step, warning = next((step, it) for step, it in said if it.signal == "overflow_steps")
    assert warning.module == growing_cases.MODULE
    assert found["overflow"] - 36 <= step <= found["overflow"] - 24
