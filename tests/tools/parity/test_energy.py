"""Energy counters: read where the machine has them, absent where it has not."""

from tools.parity.energy import of_processors, used


def test_packages_are_summed_and_their_parts_are_not(tmp_path):
    for name, value in (("intel-rapl:0", 2_000_000), ("intel-rapl:1", 500_000), ("intel-rapl:0:0", 99_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
    assert of_processors(tmp_path) == 2.5


def test_a_machine_that_reports_nothing_gives_nothing(tmp_path):
    assert of_processors(tmp_path) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert of_processors(tmp_path) is None


def test_only_a_difference_of_two_readings_that_grew_is_energy():
    assert used(10.0, 12.5) == 2.5
    assert used(None, 12.5) is used(10.0, None) is used(12.0, 1.0) is None
