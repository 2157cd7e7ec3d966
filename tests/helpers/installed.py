"""A distribution that lies in a folder, as pip installs one."""

from pathlib import Path


def distribution(folder: Path, name: str, **groups: dict[str, str]) -> None:
    """Write the metadata of a package with entry points, by group and name."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[fedbayes.{group}]", *(f"{n} = {place}" for n, place in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
