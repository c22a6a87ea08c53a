"""An op that cannot be built ends the run in one line that says what to install."""

import pytest

from config.errors import UserError
from training.engine.ops import load_op


def test_without_a_compiler_the_line_names_the_setting_and_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    with pytest.raises(UserError, match=r"zero_optimization\.offload_optimizer: .*cpu_adam .*apt-get install g\+\+"):
        load_op("CPUAdamBuilder", "zero_optimization.offload_optimizer")
