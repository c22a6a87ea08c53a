"""Two pods of the JobSet on one machine: two supervisors, two torchruns, one run. A minute on a busy machine."""

import pytest

from config import cli
from tests.launch.kubernetes.test_manifests import machine, manifests, saved, train_and_ask_to_stop
from tests.support.machines.kubernetes_checks import pods

pytestmark = pytest.mark.cluster

__all__ = ["machine"]


def test_the_pods_of_the_jobset_train_together_and_save_when_one_is_asked_to_stop(machine):
    """The one that was asked ends with 75, the other with that or, where torchrun was faster, with 1."""
    both = [pod for pod in pods(manifests()) if pod.name.startswith("jobset")]
    codes = train_and_ask_to_stop(machine, both)
    assert codes[1] == cli.PREEMPTED and codes[0] in (1, cli.PREEMPTED)
    assert saved(machine)
