"""The right device and link first, in synthetic jobs by the noise file (tuning seeds), and what may not change a ranking."""

from __future__ import annotations

import numpy as np
import pytest
from support.traces.watched_jobs import RECENT, JobShape, job, links

from unskew.analytics.lab.culprits import own_from_waits, rank_devices, rank_links
from unskew.analytics.lab.studies.noise import load_noise

NOISE = load_noise()
LAYOUTS = {"TP8": JobShape(8, 4, 4), "TP2, compared with the other replicas": JobShape(2, 4, 8), "TP1": JobShape(1, 4, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n_faults", [1, 2])
def test_the_slow_devices_come_first_by_their_chunks(name: str, n_faults: int) -> None:
    """With fewer than three members a mild fault drowns in the uneven workload, so only strong ones are asked for there."""
    right = 0
    for seed in range(20):
        watched = job(LAYOUTS[name], n_faults, NOISE, np.random.default_rng(NOISE.seeds.tuning + seed))
        right += rank_devices(watched.own_us, RECENT).first(n_faults) == watched.culprits
    assert right >= (20 if name == "TP8" else 14)


def test_the_slow_device_comes_first_where_only_waiting_is_seen() -> None:
    for seed in range(20):
        watched = job(LAYOUTS["TP8"], 1, NOISE, np.random.default_rng(NOISE.seeds.tuning + seed))
        assert rank_devices(own_from_waits(watched.step_us, watched.waits_us), RECENT).first(1) == watched.culprits


def test_a_whole_slow_group_comes_first() -> None:
    watched = job(LAYOUTS["TP8"], 1, NOISE, np.random.default_rng(NOISE.seeds.tuning))
    own = watched.own_us.copy()
    own[-RECENT:, 2, 1, :] *= 1.6
    members = {int(index) for index in np.ravel_multi_index(([2] * 8, [1] * 8, range(8)), own.shape[1:])}
    assert len(rank_devices(own, RECENT).first(9) & members) == 8


def test_uneven_work_of_a_replica_accuses_none_of_its_devices() -> None:
    """Three times the work for one replica: its devices do not come before the one that is slow elsewhere."""
    for name, layout in LAYOUTS.items():
        watched = job(layout, 0, NOISE, np.random.default_rng(NOISE.seeds.tuning))
        own = watched.own_us.copy()
        own[-RECENT:, 0] *= 3.0
        own[-RECENT:, 1, 2, 0] *= 1.5
        first = rank_devices(own, RECENT).order[0]
        assert np.unravel_index(first, own.shape[1:]) == (1, 2, 0), name


def test_the_slow_link_comes_first() -> None:
    for seed in range(20):
        times, slow = links(JobShape(8, 8, 32), NOISE, np.random.default_rng(NOISE.seeds.tuning + seed))
        assert rank_links(times, RECENT).first(1) == {slow}


def test_without_a_past_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match="10 iterations leave no past before the last 10"):
        rank_links(np.ones((10, 4, 3)), 10)
