"""The packages of a release: identical builds, complete archives, light imports."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from benchmarks.startup import COMMANDS, seconds

from tests import ROOT


@pytest.mark.parametrize(("name", "limit"), [("import fedbayes", 0.5), ("fedbayes --help", 0.3)])
def test_starts_are_light(name, limit):
    """In CPU time, since other processes take turns; three times the limit on a slow machine."""
    assert seconds(COMMANDS[name], times=3) < 3 * limit


def test_a_version_has_at_most_25_lines_in_the_changelog():
    _, *versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert len(versions) >= 3
    for version in versions:
        assert len(version.strip().split("\n")) <= 25, version.split()[0]


def build(out, folder=ROOT):
    """Build the archives of a package as `make release` does."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(folder)],
        env={**clean, "SOURCE_DATE_EPOCH": "1700000000"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    return sorted(Path(out).iterdir())


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    pytest.importorskip("build")
    return build(tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_two_builds_are_the_same_to_the_byte(archives, tmp_path):
    again = build(tmp_path)
    assert [path.name for path in again] == [path.name for path in archives]
    digests = [[hashlib.sha256(f.read_bytes()).digest() for f in fs] for fs in (archives, again)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_archives_have_all_files_of_the_package(archives):
    wheel, source = archives
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert zipfile.ZipFile(wheel).testzip() is None
    assert wanted <= {*zipfile.ZipFile(wheel).namelist()}
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} <= inside
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= inside
    assert sum(path.stat().st_size for path in archives) < 10e6


@pytest.mark.slow
def test_a_bare_environment_runs_both_archives(archives, tmp_path):
    """Nothing but Python and what the archive asks for; the folder is empty."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    place, bare = tmp_path / "here", tmp_path / "venv" / "bin"
    place.mkdir()

    def run(*words, cwd=place):
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=clean,
            check=False,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", bare.parent)
    wheel, source = archives
    pinned = ("--constraint", ROOT / "constraints.txt")
    for archive, more in ((wheel, pinned), (source, ("--force-reinstall", "--no-deps"))):
        run(bare / "python", "-m", "pip", "install", "--quiet", *more, archive)
        out = place / archive.suffix[1:]
        run(bare / "fedbayes", "run", "--rounds", 1, "--set", "data.limit=300", "--out", out)
        assert (out / "model.safetensors").exists()
        where = run(bare / "python", "-c", "import fedbayes; print(fedbayes.__file__)")
        assert where.startswith(str(bare.parent))
        assert run(bare / "fedbayes", "--version").strip() in archive.name
