"""The runs of the main job test what they are there for."""

import torch

from parity.corpus import Corpus, encoder, read_texts
from parity.runs import SMALL, all_runs, execute
from serving.runner import Policy


def test_a_run_reads_batch_window_and_slots(worlds, model) -> None:
    """Of the lagging run's lookbacks at least 5 % each come from the batch, from windows and from slots."""
    world = worlds["flash"]
    runs = all_runs(world)
    lagging = next(run for run in runs if run.name == "lagging")
    assert lagging.policy is Policy.LAGGING
    corpus = Corpus(read_texts(), encoder(world, None), world)
    rows = SMALL.rows // len(runs)
    result = execute(lagging, corpus, [model[0]], torch.device("cpu"), size=SMALL, rows=rows, seed=3)
    assert result.equal
    shares = {source: result.sources[source] / result.sources.total() for source in ("batch", "window", "slot")}
    assert min(shares.values()) >= 0.05, shares
