"""What a division leaves out, in words for the user."""

import numpy as np

from fedbayes.core.wording import listed
from fedbayes.data.dataset import Dataset, Rows
from fedbayes.data.holdout import held_out
from fedbayes.data.schemes import Division, choose_scheme
from fedbayes.data.settings import DataSettings


def left_out(
    dataset: Dataset,
    settings: DataSettings,
    pool: Rows,
    division: Division,
    test: Division,
    official: Rows,
    fraction: float | None,
) -> list[str]:
    """Sentences on clients and samples that a division leaves out, where no limit asked for it,
    on an official test part that is trained on, and on classes of it that nobody trains on.

    Args:
        dataset: The pool of samples.
        settings: How it was divided.
        pool: The rows that were divided.
        division: The rows of each client, before some of them are set aside or cut off.
        test: The test rows of each client.
        official: The official test rows that were dealt, if any.
        fraction: The part of its rows that a client tests on, if it keeps them itself.
    """
    scheme = choose_scheme(dataset, settings)
    first = [*_pooled(dataset, settings, fraction), *_new_classes(dataset, division, official)]
    if scheme == "natural":
        return [
            *first,
            *_groups(dataset, settings, pool, division, fraction),
            *_test_groups(dataset, official, division),
        ]
    left = len(pool) - len(division.rows)
    clients = len(division.names)
    if scheme == "counts":
        left -= len(test.rows) if settings.test_counts is not None else 0
        kept = "class_counts and test_counts" if settings.test_counts else "class_counts"
        reason = f"not assigned to a client by {kept}"
    elif scheme == "shards":
        reason = f"left over by {clients} x {settings.shards_per_client} shards of equal size"
    elif ":" in scheme:
        reason = f"not assigned to a client by {scheme}"
    else:
        reason = f"left over, because {clients} clients have equal numbers"
    notes = [f"{left:,} of {len(pool):,} samples are {reason}"] if left else []
    notes = [*first, *notes]
    if settings.test_counts is not None and dataset.official_train is not None:
        unused = dataset.samples - dataset.official_train
        notes.append(
            f"the official test part of {unused:,} samples is not used, because test_counts takes "
            "other samples"
        )
    return notes


def _pooled(dataset: Dataset, settings: DataSettings, fraction: float | None) -> list[str]:
    """What to say of an official test part where clients test on a fraction of their own."""
    if fraction is None or dataset.official_train is None:
        return []
    part = f"the official test part of {dataset.samples - dataset.official_train:,} samples is"
    if settings.official_test == "unread":
        return [f"{part} not read, since official_test = 'unread'"]
    return [
        f"{part} pooled with the training part, because with test = {fraction} clients test on "
        "their own samples. Leave data.test out to test on that part, or set data.official_test "
        "= 'unread' to keep it out while you choose settings"
    ]


def _new_classes(dataset: Dataset, division: Division, official: Rows) -> list[str]:
    """What to say of classes of official test rows that no client trains on."""
    tested = np.bincount(dataset.strata[official], minlength=len(dataset.classes))
    trained = np.bincount(dataset.strata[division.rows], minlength=len(dataset.classes))
    new = np.flatnonzero((tested > 0) & (trained == 0))
    if not len(new):
        return []
    return [
        f"{tested[new].sum():,} of {len(official):,} official test samples have classes that no "
        f"client trains on: {listed(dataset.classes[index] for index in new)}"
    ]


def _groups(
    dataset: Dataset, settings: DataSettings, pool: Rows, division: Division, fraction: float | None
) -> list[str]:
    """Sentences on the groups that are no clients."""
    groups = np.asarray(dataset.groups)[pool]
    sizes = np.bincount(groups[groups >= 0], minlength=len(dataset.group_names))
    client = np.isin(np.array(dataset.group_names), np.array(division.names))
    trained = sizes - (held_out(sizes, fraction) if fraction is not None else 0)
    large = trained >= settings.min_samples
    notes = []
    if small := np.flatnonzero(~large & (sizes > 0)).tolist():
        of_them = "" if fraction is None else ", besides those that it tests on"
        notes.append(
            f"{len(small):,} of {len(sizes):,} groups are left out, because a client needs "
            f"{settings.min_samples} training samples{of_them}: {_named(dataset, sizes, small)}. "
            f"data.min_samples = {trained[small].min()} keeps them"
        )
    if empty := np.flatnonzero(sizes == 0).tolist():
        notes.append(
            f"{len(empty):,} of {len(sizes):,} groups are left out, because they have no training "
            f"samples: {listed(dataset.group_names[group] for group in empty)}"
        )
    if beyond := np.flatnonzero(large & ~client).tolist():
        notes.append(
            f"clients = {settings.clients} takes the first of {large.sum():,} groups; left out: "
            f"{_named(dataset, sizes, beyond)}"
        )
    if stray := int((groups < 0).sum()):
        notes.append(f"{stray:,} of {len(pool):,} samples belong to no group, and are left out")
    return notes


def _named(dataset: Dataset, sizes: Rows, groups: list[int]) -> str:
    first, *others = [f"{dataset.group_names[group]} ({sizes[group]:,}" for group in groups]
    unit = "sample)" if sizes[groups[0]] == 1 else "samples)"
    return listed([f"{first} {unit}", *(f"{other})" for other in others)])


def _test_groups(dataset: Dataset, official: Rows, division: Division) -> list[str]:
    """Sentences on official test rows of groups that are no clients."""
    groups = np.asarray(dataset.groups)[official]
    names = np.array(dataset.group_names)
    lost = (groups >= 0) & ~np.isin(names, np.array(division.names))[groups]
    if not lost.any():
        return []
    return [
        f"{lost.sum():,} of {len(official):,} official test samples are left out, because their "
        f"groups are not clients: {listed(names[np.unique(groups[lost])])}"
    ]
