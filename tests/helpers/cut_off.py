"""Runs that are cut off at each of their writes and gone on with: they end as if they had not."""

import fedbayes
from fedbayes.storage import checkpoints, folder, private_states


class _Cut(Exception):
    pass


def cut_off_at_every_write(config, place, monkeypatch, assert_same, *, halves):
    """Cut off a run at its first write but one, another at the next, until one ends before.

    Args:
        config: of the runs.
        place: folder for them.
        monkeypatch: as pytest gives it.
        assert_same: of the folder of a run that was never cut off, and of one that was.
        halves: whether a part of what was not written stays beside its name, as a kill leaves it.
    """
    whole = fedbayes.run(config, place / "whole").folder.path
    write, left = folder.write_beside, -1

    def counted(path, data):
        nonlocal left
        if left == 0:
            if halves:
                every = data if isinstance(data, bytes) else b"".join(data)
                path.with_name(f".{path.name}.0").write_bytes(every[: len(every) // 2])
            raise _Cut
        left -= 1
        write(path, data)

    for module in (checkpoints, folder, private_states):
        monkeypatch.setattr(module, "write_beside", counted)
    for cut in range(1, 100):
        broken, left = place / str(cut), cut
        try:
            fedbayes.run(config, broken)
        except _Cut:
            left = -1
            fedbayes.resume(broken)
            assert_same(whole, broken)
        else:
            break
    assert cut > 10
